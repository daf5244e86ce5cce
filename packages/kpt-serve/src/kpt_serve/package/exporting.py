"""Make a program of a model by `torch.export`, with weights as arguments, that holds nothing a reader refuses."""

import inspect
import io
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import kpt_core
from kpt_serve.errors import PackageError

from .manifest import Dimension
from .manifest import Tensor as Described
from .reading import scan
from .weights import Weighted, Weights

#: The sizes of a dimension: smallest and largest, after a name that dimensions of equal size share.
Range = tuple[int, int | None] | tuple[str, int, int | None]
Dynamic = Mapping[str, Mapping[int, Range]]
Inputs = Tensor | Sequence[Any] | Mapping[str, Any]

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
def _position(model: nn.Module) -> Iterator[Callable[[], str]]:
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


def inputs_of(program: ExportedProgram, weights: int) -> list[torch.fx.Node]:
    """Return the nodes of the inputs that come after so many weights."""
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
    families = {name.partition(".")[0] for name in called_ops(program)}
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
                # What prepares an op's arguments, as attention_all_blocks, is defined where the op of its family is.
                if str(target._schema.name).partition("::")[2].partition("_")[0] in families:
                    continue
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


def save(program: ExportedProgram, path: Path) -> None:
    """Write a program that every reader takes.

    Raises:
        PackageError: A reader would refuse it.
    """
    # Readers would unpickle them.
    program._example_inputs = None
    # In memory first: of a full disk torch's own writer ends the process. Without weights it is small.
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())
    try:
        scan(path)
    except PackageError as error:
        raise PackageError(f"the program would be refused by every reader: {error}") from error


def called_ops(program: ExportedProgram) -> list[str]:
    """Return the names of the ops of KPT that a program calls."""
    names = {name.replace(".", "_"): name for name in kpt_core.ops()}
    found = set()
    for module in (each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)):
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kpt":
                found.add(_op_of(node.target, names))
    return sorted(names[name] for name in found if name is not None)


def describe_tensor(name: str, value: Tensor, program: ExportedProgram) -> Described:
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
