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

from kpt_core.errors import InputError
from kpt_optimize.rewrite import check_model

from .sizes import format_bytes, model_tensors, storage_bytes


@dataclass(frozen=True, slots=True)
class ModelMemoryReport:
    """What `optimize_model_memory` did; bytes are measured over whole storages.

    Attributes:
        bytes_before: parameters, gradients and buffers before.
        bytes_after: and after.
        saved: bytes of each step: `gradients`, `storages`.
        checkpointed: names of the blocks that are recomputed in the backward pass; `estimate` tells what it saves.
    """

    bytes_before: int
    bytes_after: int
    saved: dict[str, int] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = ", ".join(f"{step} {format_bytes(count)}" for step, count in self.saved.items())
        text = f"{format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} after; saved: {steps}"
        if self.checkpointed:
            text += f"; {len(self.checkpointed)} blocks are recomputed in the backward pass"
        return text


def optimize_model_memory(
    model: nn.Module, *, checkpoint: bool | Iterable[type[nn.Module]] = False
) -> ModelMemoryReport:
    """Make a model take less memory, in place; Parameter objects, names and values stay.

    Gradients are released. A parameter or buffer that is a view of a larger storage, which it keeps alive as a whole,
    gets a storage of its own size; the larger one goes when nothing outside the model uses it, and tensors outside the
    model that shared memory with the parameter stop sharing it. Tensors of the model that overlap stay together.

    Args:
        model: the model.
        checkpoint: True lets the blocks of the outermost `nn.ModuleList`s recompute their activations in the backward
            pass; module classes name the blocks instead.

    Raises:
        InputError: no module, or no block found for `checkpoint`.
    """
    check_model(model)
    blocks = _blocks(model, checkpoint)
    sizes = [storage_bytes(model_tensors(model))]

    model.zero_grad(set_to_none=True)
    sizes.append(storage_bytes(model_tensors(model)))
    _shrink_storages(model)
    sizes.append(storage_bytes(model_tensors(model)))

    block: Any
    for block in blocks.values():
        # An attribute of the instance, so that names of modules, parameters and the state dict stay.
        block.forward = partial(recompute, block.forward, use_reentrant=False)
    saved = {step: sizes[i] - sizes[i + 1] for i, step in enumerate(("gradients", "storages"))}
    return ModelMemoryReport(sizes[0], sizes[-1], saved, tuple(blocks))


def _blocks(model: nn.Module, checkpoint: bool | Iterable[type[nn.Module]]) -> dict[str, nn.Module]:
    """The blocks that are to be recomputed, outermost ones only, without those that are already."""
    if checkpoint is False:
        return {}
    classes: tuple[Any, ...] = (nn.ModuleList,) if checkpoint is True else tuple(checkpoint)
    if wrong := [item for item in classes if not (isinstance(item, type) and issubclass(item, nn.Module))]:
        raise InputError(f"optimize_model_memory: checkpoint takes True or classes of modules; got {wrong[0]!r}")
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, classes) and not any(not other or name.startswith(f"{other}.") for other in found):
            found[name] = module
    if checkpoint is True:
        found = {
            f"{name}.{index}".removeprefix("."): block
            for name, blocks in found.items()
            for index, block in blocks.named_children()
        }
    if not found:
        wanted = (
            "it has no nn.ModuleList with blocks; name their classes, as in checkpoint=(Block,)"
            if checkpoint is True
            else f"none of its modules is a {' or '.join(item.__name__ for item in classes)}"
        )
        raise InputError(f"optimize_model_memory: nothing to checkpoint in {type(model).__name__}: {wanted}")
    return {name: block for name, block in found.items() if not _recomputed(block)}


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
