"""Write a package: a model as a program beside its weights, or a Hugging Face folder as it is, whole or not at all."""

import inspect
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import kpt_core
from kpt_serve.errors import PackageError

from . import golden as golden_results
from .manifest import Dimension, Distribution, Manifest, RequiredOp, Tolerance, describe_file
from .manifest import Tensor as Described
from .reading import scan
from .staging import staged
from .weights import PROGRAM, Weighted, Weights

#: The sizes of a dimension: smallest and largest, after a name that dimensions of equal size share.
Range = tuple[int, int | None] | tuple[str, int, int | None]
Dynamic = Mapping[str, Mapping[int, Range]]
Inputs = Tensor | Sequence[Any] | Mapping[str, Any]

TOLERANCE = Tolerance(mean=1.1, max=2.0)
#: A dtype in the words of the Open Inference Protocol.
DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}


def write_program(
    folder: str | os.PathLike[str],
    model: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    dynamic: Dynamic | None = None,
    outputs: Sequence[str] | None = None,
    device_types: Sequence[str] | None = None,
    tolerance: Tolerance = TOLERANCE,
    seed: int = 0,
    plan: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a model as a package: its program, its weights, golden results and the manifest.

    Args:
        folder: New or empty. It appears when all is written, or not at all.
        model: In evaluation mode while it is exported; it is left as it was.
        inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments. What is no tensor is
            fixed in the program. A dimension that is dynamic has at least 2 here: torch takes a size of 1 for fixed.
        name: Of the package.
        dynamic: By the name of an input and the axis, the smallest and largest size, None for no limit:
            `{"x": {0: (1, 64)}}`. Dimensions that are always equal share a name: `{0: ("batch", 1, 64)}`.
        outputs: Names of the results, in their order; those that the model gives them if left out.
        device_types: Where the program may run; where it is exported if left out.
        tolerance: How far from the golden results an answer may be, as multiples of the error here.
        seed: Of the golden inputs that are drawn.
        plan: A file that goes along as `kpt_plan.json`.
        overwrite: Replace a package that is there.

    Raises:
        PackageError: The model can't be exported, or the program would hold what no reader takes; or the folder is
            taken, or can't be written.
    """
    given = Arguments.of(model, inputs)
    weights = Weights.of(model)
    devices = {tensor.device.type for tensor in (*weights.flat.values(), *given.tensors.values())}
    if len(devices) > 1:
        raise PackageError(f"the model and its inputs are on {' and '.join(sorted(devices))}; expected one device")
    with staged(folder, overwrite=overwrite) as staging, evaluating(model), torch.no_grad():
        program, results = export(model, weights, given, dynamic or {})
        results = _renamed(results, outputs)
        values = next(node for node in program.graph.nodes if node.op == "output").args[0]
        described_outputs = tuple(
            _described(result, value.meta["val"], program) for result, value in zip(results, values, strict=True)
        )
        described_inputs = tuple(
            _described(each, placeholder.meta["val"], program)
            for each, placeholder in zip(given.tensors, _inputs_of(program, len(weights.flat)), strict=True)
        )
        weights.save(staging)
        _save(program, staging / PROGRAM)
        if plan is not None:
            shutil.copyfile(plan, staging / "kpt_plan.json")
        dtypes = {tensor.dtype for tensor in (*weights.flat.values(), *given.tensors.values())}
        dtypes |= {value.meta["val"].dtype for value in values}
        manifest = Manifest(
            name=name,
            kind="program",
            inputs=described_inputs,
            outputs=described_outputs,
            ops=required_ops(program),
            device_types=tuple(device_types or sorted(devices or {"cpu"})),
            dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            distributions=_distributions("==" + ".".join(torch.__version__.split(".")[:2]) + ".*"),
            tolerance=tolerance,
            files=(),
        )
        golden_results.write_program_results(staging, manifest, model, weights, given, dynamic or {}, seed)
        return finish(staging, manifest)


def finish(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with the files that the folder has, and return it."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    whole = Manifest(**{**vars(manifest), "files": tuple(describe_file(folder, path) for path in found)})
    whole.write(folder)
    return whole


def _renamed(results: Sequence[str], outputs: Sequence[str] | None) -> tuple[str, ...]:
    if outputs is None:
        return tuple(results)
    if len(outputs) != len(results) or len(set(outputs)) != len(outputs):
        found = ", ".join(results)
        raise PackageError(f"outputs={list(outputs)} for {len(results)} results ({found}); expected a name for each")
    return tuple(outputs)


@dataclass(frozen=True)
class Arguments:
    """The inputs of a model: tensors by name, of which the first go by position, and what is no tensor."""

    tensors: dict[str, Tensor]
    positional: int
    fixed: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> "Arguments":
        """Name the inputs of a model as its forward does.

        Raises:
            PackageError: An input is no tensor and has no name, or holds tensors.
        """
        if isinstance(inputs, Mapping):
            tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            fixed = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
            for name, value in fixed.items():
                if not isinstance(value, bool | int | float | str | None):
                    raise _no_tensor(name, value)
            return cls(tensors, 0, fixed)
        values = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        tensors = {}
        for name, value in zip(_names(model, len(values)), values, strict=True):
            if not isinstance(value, Tensor):
                raise _no_tensor(name, value)
            tensors[name] = value
        return cls(tensors, len(tensors), {})

    def call(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the positional and the named arguments of a call of the model with other tensors."""
        names = list(self.tensors)
        positional = tuple(tensors[name] for name in names[: self.positional])
        return positional, {**self.fixed, **{name: tensors[name] for name in names[self.positional :]}}


def _no_tensor(name: str, value: object) -> PackageError:
    return PackageError(
        f"input {name!r} is a {type(value).__name__}; expected a tensor: give numbers, texts and None by keyword, "
        "and a model around yours that takes tensors for anything else"
    )


def _names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [names[index] if index < len(names) else f"input_{index}" for index in range(count)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def export(
    model: nn.Module, weights: Weights, given: Arguments, dynamic: Dynamic
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Return the program of a model, which takes its weights first, and the names of its results.

    Raises:
        PackageError: It can't be exported, or holds what no reader takes; the module or the op is named.
    """
    results: list[str] = []
    wrapper = Weighted(model, weights, given.positional, list(given.tensors)[given.positional :], given.fixed, results)
    shapes: tuple[Any, ...] = ({name: {} for name in weights.flat}, _shapes(given.tensors, dynamic))
    with _position(model) as position:
        try:
            program = torch.export.export(
                wrapper, (weights.flat, *given.tensors.values()), dynamic_shapes=shapes, strict=False
            )
        except PackageError:
            raise
        except Exception as error:  # torch.export raises whatever the model and its own many parts raise
            raise PackageError(f"{position()} can't be exported: {_first_line(error)}") from error
    _check(program, weights, type(model).__name__)
    return program, tuple(results)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of violated constraints the first line says that there are some, and each reason has a dash.
    reasons = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return f"{type(error).__name__}: {(reasons or lines or ['no reason given'])[0][:400]}"


@contextmanager
def _position(model: nn.Module) -> Iterator[Any]:
    """Give a function that says in which module a call was when it raised."""
    inside: list[str] = []
    handles = []
    for name, module in model.named_modules():
        label = f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: inside.append(label)))
        handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        yield lambda: inside[-1] if inside else f"the model ({type(model).__name__})"
    finally:
        for handle in handles:
            handle.remove()


def _shapes(tensors: Mapping[str, Tensor], dynamic: Dynamic) -> tuple[dict[int, Any], ...]:
    for name in dynamic.keys() - tensors.keys():
        raise PackageError(f"dynamic names input {name!r}; the inputs are {', '.join(tensors)}")
    shared: dict[str, tuple[tuple[int, int | None], Any]] = {}
    shapes = []
    for number, (name, tensor) in enumerate(tensors.items()):
        axes: dict[int, Any] = {}
        for axis, given in dynamic.get(name, {}).items():
            place = f"dynamic[{name!r}][{axis}]"
            if not 0 <= axis < tensor.dim():
                raise PackageError(f"{place}: the input has {tensor.dim()} dimensions; expected one of these")
            symbol, least, most = given if len(given) == 3 else (f"kpt_{number}_{axis}", *given)
            size = tensor.shape[axis]
            if (most is not None and most < max(least, 2)) or least < 0:
                raise PackageError(f"{place} is {given}; expected 0 <= smallest < largest, or None for no limit")
            if size < max(least, 2) or (most is not None and size > most):
                bounds = f"{max(least, 2)} to {most or 'any'}"
                raise PackageError(f"{place}: the example input has size {size}; expected {bounds}: give another")
            bound = shared.setdefault(symbol, ((least, most), Dim(symbol, min=least, max=most)))
            if bound[0] != (least, most):
                raise PackageError(f"{place} is {given}; {symbol!r} is {bound[0]} elsewhere: expected the same range")
            axes[axis] = bound[1]
        shapes.append(axes)
    return tuple(shapes)


def _inputs_of(program: ExportedProgram, weights: int) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"][weights:]


def _check(program: ExportedProgram, weights: Weights, model: str) -> None:
    """Raise, with the module or the weight, for what no reader takes."""
    for name in program.constants:
        raise PackageError(
            f"{model} holds a constant tensor, {name!r}, that is no weight: register it as a buffer "
            "(register_buffer), and call torch.tensor outside of forward"
        )
    if changed := _changed(program):
        raise PackageError(
            f"{model} changes {changed[0]!r} in forward; expected a model that changes neither its weights nor its "
            "inputs: a program has no state"
        )
    names = {name.replace(".", "_") for name in kpt_core.ops()}
    for module in (each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)):
        for node in module.graph.nodes:
            # They hold paths of this machine.
            node.meta.pop("stack_trace", None)
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "kpt"):
                raise PackageError(
                    f"{_module_of(node, model)} calls op {target}; expected ops of PyTorch (aten) and of KPT's packages"
                )
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "kpt" and not _op_of(target, names):
                raise PackageError(f"{_module_of(node, model)} calls op {target}, which no installed package declares")


def _changed(program: ExportedProgram) -> list[str]:
    """Return the arguments that a program writes into; as it is exported, its graph alone may say so."""
    schemas = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    if any(schema is not None and schema.is_mutable for schema in schemas):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch copies what it deprecates
            program = program.run_decompositions({})
    signature = program.graph_signature
    return [*signature.user_inputs_to_mutate.values(), *signature.buffers_to_mutate.values()]


def _module_of(node: torch.fx.Node, model: str) -> str:
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    if not stack or not stack[-1][0]:
        return model
    return f"module {stack[-1][0]!r}"


def _op_of(target: Any, names: Collection[str]) -> str | None:
    """Return the name of the op that a torch op of ours stands for, with underscores."""
    name = str(target._schema.name).partition("::")[2]
    return next((each for each in (name, name.removesuffix("_functional")) if each in names), None)


def _save(program: ExportedProgram, path: Path) -> None:
    program._example_inputs = None  # readers would unpickle them
    torch.export.save(program, path)
    try:
        scan(path)
    except PackageError as error:
        raise PackageError(f"the program would be refused by every reader: {error}") from error


def required_ops(program: ExportedProgram) -> tuple[RequiredOp, ...]:
    """Return the ops of KPT that a program calls, with the distribution that declares each."""
    names = {name.replace(".", "_"): name for name in kpt_core.ops()}
    found = set()
    for module in (each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)):
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kpt":
                found.add(names[str(_op_of(node.target, names))])
    return tuple(map(required_op, sorted(found)))


def required_op(name: str) -> RequiredOp:
    """Return what a package says of an op: the distribution that declares it, and the versions that fit.

    Raises:
        PackageError: No installed distribution declares the op.
    """
    package = kpt_core.get_op(name).defined_in.partition(".")[0].partition(":")[0]
    for entry in metadata.entry_points(group="kpt.ops"):
        if entry.module.partition(".")[0] == package and entry.dist is not None:
            return RequiredOp(name, entry.dist.name, compatible(entry.dist.version))
    raise PackageError(
        f"op {name!r} is defined in {package}, which no installed distribution lists under 'kpt.ops'; expected an "
        "installed package, so that others can be told which one they need"
    )


def compatible(version: str) -> str:
    """Return the range of versions that keep what a version promises: `>=0.1,<0.2`, and from 1.0 on `>=1.2,<2`."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def _distributions(torch_versions: str) -> tuple[Distribution, ...]:
    core = metadata.version("kpt-core")
    return Distribution("kpt-core", compatible(core)), Distribution("torch", torch_versions)


def _described(name: str, value: Tensor, program: ExportedProgram) -> Described:
    """Return an input or output in the manifest's words."""
    if value.dtype not in DATATYPES:
        raise PackageError(
            f"{name!r} is of dtype {value.dtype}, which the Open Inference Protocol has no word for; expected one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DATATYPES)}"
        )
    shape: list[int] = []
    dynamic: list[Dimension] = []
    sizes: list[Any] = list(value.shape)  # numbers, and torch.SymInt for dynamic ones
    for axis, size in enumerate(sizes):
        if isinstance(size, int):
            shape.append(size)
            continue
        least, most = _bounds(size, program)
        shape.append(-1)
        dynamic.append(Dimension(axis, least, most))
    return Described(name, DATATYPES[value.dtype], tuple(shape), tuple(dynamic))


def _bounds(size: torch.SymInt, program: ExportedProgram) -> tuple[int, int | None]:
    from torch.utils._sympy.value_ranges import bound_sympy

    # Bounds of a symbol are those that were asked for; of the rest what follows from them.
    bounds = bound_sympy(size.node.expr, dict(program.range_constraints))
    least = int(bounds.lower) if bounds.lower.is_finite and bounds.lower.is_number else 0
    upper = bounds.upper
    endless = not upper.is_finite or str(upper) == "int_oo" or int(upper) >= torch.iinfo(torch.int64).max - 1
    return max(least, 0), None if endless else int(upper)
