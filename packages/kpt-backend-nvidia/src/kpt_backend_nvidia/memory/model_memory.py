"""A model made smaller without a change of what it computes."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from kpt_core import InputError

from .estimate import estimate
from .sizes import check_model, format_bytes, model_tensors, storage_bytes


@dataclass(frozen=True, slots=True)
class ModelMemoryReport:
    """What `optimize_model_memory` did; bytes are measured over whole storages.

    Attributes:
        bytes_before: parameters, gradients and buffers before.
        bytes_after: and after.
        saved: bytes of each step: `gradients`, `storages`, `dtype`.
        checkpointed: names of the blocks that are recomputed in the backward pass.
        activations_before: bytes alive between forward and backward before; None without example inputs.
        activations_after: and after.
    """

    bytes_before: int
    bytes_after: int
    saved: dict[str, int] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    activations_before: int | None = None
    activations_after: int | None = None

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {format_bytes(count)}" for step, count in self.saved.items())
        text = f"{format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} after; saved: {steps}"
        if self.checkpointed:
            text += f"; {len(self.checkpointed)} blocks are recomputed in the backward pass"
        if self.activations_before is not None and self.activations_after is not None:
            text += (
                f"; activations {format_bytes(self.activations_before)} before, "
                f"{format_bytes(self.activations_after)} after"
            )
        return text


def optimize_model_memory(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    checkpoint: bool | Iterable[type[nn.Module]] = False,
    dtype: torch.dtype | None = None,
) -> ModelMemoryReport:
    """Make a model take less memory, in place; Parameter objects, names and (without `dtype`) values stay.

    Gradients are released. A parameter or buffer that is a view of a larger storage, which it keeps alive as a whole,
    gets a storage of its own size; the larger one goes when nothing outside the model uses it, and tensors outside the
    model that shared memory with the parameter stop sharing it. Tensors of the model that overlap stay together.

    Args:
        model: the model.
        example_inputs: arguments of the model's forward (tensor, tuple or dict of keyword arguments), with which the
            report tells the activations too.
        checkpoint: True lets the blocks of the outermost `nn.ModuleList`s recompute their activations in the backward
            pass; module classes name the blocks instead.
        dtype: float16, bfloat16, float32 or float64, to which floating-point parameters and buffers are cast. This
            changes outputs by rounding.

    Raises:
        InputError: no module, no such dtype, or no block found for `checkpoint`.
    """
    check_model("optimize_model_memory", model)
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"optimize_model_memory: dtype must be float16, bfloat16, float32 or float64; got {dtype}")
    blocks = _blocks(model, checkpoint)
    activations = [_activations(model, example_inputs)] if example_inputs is not None else []
    sizes = [storage_bytes(model_tensors(model))]

    model.zero_grad(set_to_none=True)
    sizes.append(storage_bytes(model_tensors(model)))
    _shrink_storages(model)
    sizes.append(storage_bytes(model_tensors(model)))
    if dtype is not None:
        model.to(dtype=dtype)
    sizes.append(storage_bytes(model_tensors(model)))

    block: Any
    for block in blocks.values():
        # An attribute of the instance, so that names of modules, parameters and the state dict stay.
        block.forward = partial(recompute, block.forward, use_reentrant=False)
    if example_inputs is not None:
        activations.append(_activations(model, _cast(example_inputs, dtype)))
    saved = {step: sizes[i] - sizes[i + 1] for i, step in enumerate(("gradients", "storages", "dtype"))}
    before, after = activations or (None, None)
    return ModelMemoryReport(sizes[0], sizes[-1], saved, tuple(blocks), before, after)


def _activations(model: nn.Module, example_inputs: Any) -> int:
    return estimate(model, example_inputs, optimizer=None).activations


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating and dtype is not None else value

    return torch.utils._pytree.tree_map(cast, inputs)


def _blocks(model: nn.Module, checkpoint: bool | Iterable[type[nn.Module]]) -> dict[str, nn.Module]:
    """The blocks that are to be recomputed, outermost ones only, without those that are already."""
    if checkpoint is False:
        return {}
    if checkpoint is True:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        found = {
            f"{name}.{index}".removeprefix("."): block
            for name in lists
            if not _inside(name, lists)
            for index, block in model.get_submodule(name).named_children()
        }
        wanted = "it has no nn.ModuleList with blocks; name their classes, as in checkpoint=(Block,)"
    else:
        classes: tuple[Any, ...] = tuple(checkpoint)
        if wrong := [item for item in classes if not (isinstance(item, type) and issubclass(item, nn.Module))]:
            raise InputError(f"optimize_model_memory: checkpoint takes True or classes of modules; got {wrong[0]!r}")
        found = {}
        for name, module in model.named_modules():
            if isinstance(module, classes) and not _inside(name, found):
                found[name] = module
        wanted = f"none of its modules is a {' or '.join(item.__name__ for item in classes)}"
    if not found:
        raise InputError(f"optimize_model_memory: nothing to checkpoint in {type(model).__name__}: {wanted}")
    return {name: block for name, block in found.items() if not _recomputed(block)}


def _inside(name: str, others: Iterable[str]) -> bool:
    """Whether the module `name` lies inside one of `others`."""
    return any(name != other and (not other or name.startswith(f"{other}.")) for other in others)


def _recomputed(block: nn.Module) -> bool:
    forward = block.forward
    return isinstance(forward, partial) and forward.func is recompute


def _shrink_storages(model: nn.Module) -> None:
    users: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.layout is torch.strided and type(tensor.data) is Tensor:
            users[tensor.untyped_storage()._cdata][id(tensor)] = tensor
    for tensors in map(list, map(dict.values, users.values())):
        needed = sum(tensor.nbytes for tensor in tensors)
        if needed < tensors[0].untyped_storage().nbytes() and not _overlap(tensors):
            for tensor in tensors:
                tensor.data = tensor.data.clone()


def _overlap(tensors: list[Tensor]) -> bool:
    """Whether the ranges of memory that views of one storage span meet."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            start = tensor.storage_offset() * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((start, start + (last + 1) * tensor.itemsize))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))
