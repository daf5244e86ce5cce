"""Compiling one Triton function for one chip, with no GPU."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from kpt_core import InputError, UnknownNameError

from .chips import Chip
from .declared import TritonProgram
from .gpus import read_amd, read_intel, read_nvidia
from .readings import Reading

_HINTS = ("1", "16")
_TARGETS = {"nvidia": ("cuda", read_nvidia), "amd": ("hip", read_amd), "intel": ("xpu", read_intel)}


def compile_triton(
    program: TritonProgram, chip: Chip, configuration: Mapping[str, Any], output: Callable[[], str]
) -> Reading:
    """Compile and read; `output` gives what the process wrote so far, with the report of ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind, read = _TARGETS[chip.vendor]
    arguments, constants, options = split(program, configuration, types_of(program, chip.name))
    target = GPUTarget(kind, chip.target if chip.vendor != "intel" else _prepare_intel(chip), chip.warp)
    if chip.vendor == "intel":
        options["threads_per_warp"] = chip.warp
    names = program.function.arg_names
    signature, attributes = {}, {}
    for name in names:
        kind, hint = arguments.get(name, ("constexpr", None))
        if hint == "1":
            kind, constants = "constexpr", {**constants, name: 1}
        elif hint == "16":
            attributes[(names.index(name),)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(program.function, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options)
    return read(chip, compiled, output())


def _prepare_intel(chip: Chip) -> dict[str, Any]:
    """Return the properties of a chip that Intel's Triton asks the runtime for, and make it compile without one.

    triton-xpu 3.3.0b1, the only one in the package index, builds a program with SYCL's headers to read the number of an
    architecture, and its `tl.range` has none of the arguments that came after Triton 3.3 and mean nothing to it.

    Raises:
        ImportError: the Triton that is installed has no part for Intel GPUs.
    """
    from triton.backends import backends
    from triton.language import core

    if "intel" not in backends:
        raise ImportError("the triton that is installed has no part for Intel GPUs: pip install triton-xpu==3.3.0b1")
    module = backends["intel"].compiler.__init__.__globals__
    module["compile_module_from_src"] = lambda source, name: SimpleNamespace(parse_device_arch=lambda number: "")
    if "warp_specialize" not in inspect.signature(core.range.__init__).parameters:
        original = core.range.__init__

        def accept(self: Any, *args: Any, warp_specialize: object = None, **kwargs: Any) -> None:
            original(self, *args, **kwargs)

        core.range.__init__ = accept
    return {
        "name": chip.name,
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": chip.name == "pvc",
        "has_subgroup_2d_block_io": True,
        "has_bfloat16_conversions": True,
        "has_fp64": chip.name == "pvc",
        "sub_group_sizes": [chip.warp, 32],
        "max_work_group_size": 1024,
        "max_num_sub_groups": 64,
    }


def types_of(program: TritonProgram, chip: str) -> Mapping[str, str]:
    """Return the types of a program's arguments on a chip: its own word for it, or its signature."""
    types = getattr(program, "types", None)
    found: Mapping[str, str] = program.signature if types is None else types(chip)
    return found


def split(
    program: TritonProgram, configuration: Mapping[str, Any], types: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str | None]], dict[str, Any], dict[str, Any]]:
    """Part a program's settings into arguments (type and hint), constexprs and compiler options.

    Raises:
        InputError: a parameter has neither type nor value, or both; Triton is told nothing of fusion.
        UnknownNameError: a name is neither a parameter nor an option.
    """
    parameters = inspect.signature(program.function.fn).parameters
    options = {name: value for name, value in configuration.items() if name not in parameters}
    constants = {name: value for name, value in configuration.items() if name in parameters}
    known = {*parameters, *_options()}
    for name in (*types, *options):
        if name not in (parameters if name in types else known):
            raise UnknownNameError(f"parameter or option of {program.function.__name__}", name, known)
    for name, parameter in parameters.items():
        if name in types and name in constants:
            raise InputError(
                f"{name} is an argument of {program.name!r} and a constexpr of its configuration; drop one"
            )
        if name not in types and name not in constants:
            if parameter.default is inspect.Parameter.empty:
                raise InputError(f"{name} of {program.name!r} has neither a type in the signature nor a value; add one")
            constants[name] = parameter.default
    if "enable_fp_fusion" not in options:
        raise InputError("the configuration does not set enable_fp_fusion; its default differs between Triton versions")
    arguments: dict[str, tuple[str, str | None]] = {}
    for name, written in types.items():
        filled = written.format_map(configuration)
        kind, _, hint = filled.rpartition(":")
        arguments[name] = (kind, hint) if hint in _HINTS else (filled, None)
    return arguments, constants, options


def _options() -> set[str]:
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    return {field.name for options in (CUDAOptions, HIPOptions) for field in fields(options)}
