"""Compiling one Triton function for one chip, with no GPU."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from kpt_core import InputError, UnknownNameError

from .chips import Chip
from .declared import TritonProgram
from .gpus import read_amd, read_nvidia
from .readings import Reading

_HINTS = ("1", "16")


def compile_triton(
    program: TritonProgram, chip: Chip, configuration: Mapping[str, Any], output: Callable[[], str]
) -> Reading:
    """Compile and read; `output` gives what the process wrote so far, with the report of ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda" if chip.vendor == "nvidia" else "hip", chip.target, chip.warp)
    arguments, constants, options = split(program, configuration)
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
    return (read_nvidia if chip.vendor == "nvidia" else read_amd)(chip, compiled, output())


def split(
    program: TritonProgram, configuration: Mapping[str, Any]
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
    for name in (*program.signature, *options):
        if name not in (parameters if name in program.signature else known):
            raise UnknownNameError(f"parameter or option of {program.function.__name__}", name, known)
    for name, parameter in parameters.items():
        if name in program.signature and name in constants:
            raise InputError(
                f"{name} is an argument of {program.name!r} and a constexpr of its configuration; drop one"
            )
        if name not in program.signature and name not in constants:
            if parameter.default is inspect.Parameter.empty:
                raise InputError(f"{name} of {program.name!r} has neither a type in the signature nor a value; add one")
            constants[name] = parameter.default
    if "enable_fp_fusion" not in options:
        raise InputError("the configuration does not set enable_fp_fusion; its default differs between Triton versions")
    arguments: dict[str, tuple[str, str | None]] = {}
    for name, written in program.signature.items():
        filled = written.format_map(configuration)
        kind, _, hint = filled.rpartition(":")
        arguments[name] = (kind, hint) if hint in _HINTS else (filled, None)
    return arguments, constants, options


def _options() -> set[str]:
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    return {field.name for options in (CUDAOptions, HIPOptions) for field in fields(options)}
