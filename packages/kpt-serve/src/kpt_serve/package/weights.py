"""Weights as arguments of a program: flat tensors by name, the model that takes them, and the program that does.

A program without weights has no pickles, and its kernels are chosen anew wherever it runs.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.func import functional_call
from torch.utils._pytree import tree_unflatten

import kpt_core
from kpt_serve.errors import PackageError

from .manifest import Manifest
from .reading import read_program

FILE, PROGRAM = "model.safetensors", "model.pt2"
_KEY = re.compile(r"[\w.:/ -]{1,512}")


@dataclass(frozen=True)
class Rebuild:
    """How a tensor is made of flat ones: taken as it is, or as the subclass that `__tensor_unflatten__` makes.

    Attributes:
        name: Of the flat tensor, where there is no subclass.
        subclass: What to make of the inner tensors, None for a plain tensor.
        inner: How each inner tensor is made.
        context: Of `__tensor_flatten__`.
        size: Of the whole.
        stride: Of the whole.
    """

    name: str
    subclass: Any = None
    inner: Mapping[str, "Rebuild"] | None = None
    context: Any = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    def make(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, of the flat ones."""
        if self.subclass is None or self.inner is None:
            return weights[self.name]
        inner = {attribute: each.make(weights) for attribute, each in self.inner.items()}
        made: Tensor = self.subclass.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made


@dataclass(frozen=True)
class Weights:
    """The parameters and buffers of a model as plain tensors, sorted by name.

    torch flattens dictionaries in their own order and safetensors gives another one, so both sides sort.
    """

    flat: dict[str, Tensor]
    parts: dict[str, Rebuild]

    @classmethod
    def of(cls, model: nn.Module) -> "Weights":
        """Return those of a model, buffers that are not saved included; what is shared is there once.

        Raises:
            PackageError: A name can't stand in a program.
        """
        found: dict[str, Tensor] = {}
        shared: dict[object, str] = {}
        parts = {name: _flatten(name, tensor, found, shared) for name, tensor in _named(model)}
        for name in found:
            if not _KEY.fullmatch(name):
                raise PackageError(
                    f"weight {name!r} has a name that programs don't take; expected letters, digits and '_.:/ -': "
                    "rename the module"
                )
        return cls(dict(sorted(found.items())), parts)

    def rebuilt(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's parameters and buffers, made of flat ones."""
        return {name: part.make(weights) for name, part in self.parts.items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the file of the weights."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(folder, FILE)
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file({name: _own(tensor) for name, tensor in self.flat.items()}, path)
        except SafetensorError as error:  # its name for a full disk
            raise PackageError(f"{path} can't be written: {error}; make room, or choose another place") from error
        path.chmod(mode)  # safetensors' files are for their owner alone, whatever the umask says


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of each module once, those that modules share under each module's name."""
    for prefix, module in model.named_modules():
        options: dict[str, bool] = {"recurse": False, "remove_duplicate": False}
        for name, tensor in (*module.named_parameters(**options), *module.named_buffers(**options)):
            yield f"{prefix}.{name}" if prefix else name, tensor


def call_with(model: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a model with other weights, as `Weights.rebuilt` names them; afterwards it has its own again.

    Each tied weight has its names here. Where torch looks for them it gives a module that stands in two places the
    other weights for good.
    """
    return functional_call(model, dict(weights), args, dict(kwargs), tie_weights=False)


def _flatten(name: str, tensor: Tensor, found: dict[str, Tensor], shared: dict[object, str]) -> Rebuild:
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {each: _flatten(f"{name}:{each}", getattr(tensor, each), found, shared) for each in names}
        return Rebuild(name, type(tensor), inner, context, tuple(tensor.shape), tuple(tensor.stride()))
    if type(tensor) is not Tensor:
        raise PackageError(
            f"weight {name!r} is a {type(tensor).__name__}, a subclass of torch.Tensor without __tensor_flatten__; "
            "expected plain tensors, or subclasses that can be taken apart: convert it first"
        )
    if tensor.is_meta or tensor.layout != torch.strided:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise PackageError(f"weight {name!r} is {what}; expected dense numbers: load the weights, or convert it first")
    place = (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride()))
    if tensor.numel():  # empty tensors have no place
        name = shared.setdefault(place, name)
    found.setdefault(name, tensor)
    return Rebuild(name)


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor that shares no memory with others, as safetensors wants them."""
    tensor = tensor.contiguous().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


class Weighted(nn.Module):
    """A model whose forward takes its weights first, and gives a flat tuple of tensors.

    Args:
        model: The model, no submodule of this one: its weights would be lifted into the program.
        weights: Its weights.
        positional: How many of the inputs go by position.
        named: Names of the inputs after those.
        fixed: Arguments that are no tensors.
        results: What the names of the results are written into.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        positional: int,
        named: Sequence[str],
        fixed: Mapping[str, Any],
        results: list[str],
    ) -> None:
        super().__init__()
        self._call: Callable[..., Any] = partial(call_with, model)
        self._weights, self._positional, self._named = weights, positional, tuple(named)
        self._fixed, self._results = dict(fixed), results

    def forward(self, weights: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the model with these weights."""
        named = dict(zip(self._named, inputs[self._positional :], strict=True))
        result = self._call(self._weights.rebuilt(weights), inputs[: self._positional], {**self._fixed, **named})
        found = dict(named_results(result))
        self._results[:] = found
        return tuple(found.values())


def named_results(result: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of a result by name: keys of mappings, places of tuples."""
    if isinstance(result, Tensor):
        return [(name or "output", result)]
    if result is None:
        return []
    if isinstance(result, Mapping):
        pairs: list[tuple[str, Any]] = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        pairs = list(zip(result._fields, result, strict=True))
    elif isinstance(result, tuple | list):
        pairs = [(str(index) if name else f"output_{index}", value) for index, value in enumerate(result)]
        if len(pairs) == 1 and not name:
            return named_results(result[0], "")
    else:
        cache = name == "past_key_values"  # what language models of transformers give unless they are told not to
        hint = "give use_cache=False beside the inputs" if cache else "let its forward return those"
        raise PackageError(
            f"the model gives a {type(result).__name__}{f' as {name}' if name else ''}; expected tensors, or tuples "
            f"and dictionaries of them: {hint}"
        )
    return [found for key, value in pairs for found in named_results(value, f"{name}.{key}" if name else key)]


class Program:
    """Run a package's program, with its weights, on a device; kernels are chosen at each call.

    Raises:
        PackageError: The program holds what no reader takes, or does not fit its weights or this machine.
    """

    def __init__(self, folder: str | os.PathLike[str], manifest: Manifest, device_type: str) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        content = read_program(Path(folder, PROGRAM))
        for op in manifest.ops:
            kpt_core.get_op(op.name)  # defines the torch op that the program calls
        try:
            program = torch.export.load(io.BytesIO(content))
            # Where it was exported is in the program: tensors that it makes are made there.
            program = move_to_device_pass(program, device_type)
            found = load_file(Path(folder, FILE), device=device_type)
        except (SafetensorError, OSError, RuntimeError, ValueError, AssertionError) as error:
            raise PackageError(f"{folder} can't be loaded: {_first_line(error)}") from error
        # Sorted as they were when the program was made.
        self.weights = dict(sorted(found.items()))
        _check_weights(folder, program, self.weights)
        self._run = program.module()
        self.inputs = tuple(each.name for each in manifest.inputs)
        self.outputs = tuple(each.name for each in manifest.outputs)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results by name.

        Raises:
            PackageError: The program does not take such inputs, or fails.
        """
        try:
            with torch.no_grad():
                results = self._run(self.weights, *(inputs[name] for name in self.inputs))
        except (RuntimeError, ValueError, AssertionError) as error:
            sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise PackageError(f"the program fails for {sizes}: {_first_line(error)}") from error
        return dict(zip(self.outputs, results, strict=True))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_weights(folder: object, program: torch.export.ExportedProgram, weights: Mapping[str, Tensor]) -> None:
    """Raise unless a file holds the weights that a program was made with."""
    _, (wanted, *_), _ = _call_of(program)
    place = f"{folder}: {FILE}"
    again = "copy the package again, or export the model again"
    if list(wanted) != list(weights):
        odd = sorted(set(wanted) ^ set(weights))
        raise PackageError(f"{place} holds other weights than the program takes, {odd[0]!r} for one; {again}")
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][: len(weights)]
    for (name, tensor), value in zip(weights.items(), values, strict=True):
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            found, expected = (f"{list(each.shape)} {each.dtype}" for each in (tensor, value))
            raise PackageError(f"{place}: weight {name!r} is {found}; the program takes {expected}: {again}")


def _call_of(program: torch.export.ExportedProgram) -> tuple[Any, Any, Any]:
    """Return how a program is called: in order, the keys of its weights stand where their values will."""
    spec = program.call_spec.in_spec
    assert spec is not None
    positional, named = tree_unflatten(list(range(spec.num_leaves)), spec)
    return spec, positional, named
