"""A model laid out as matrix units read it, or made smaller; what it computes stays."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from kpt_optimize.padding import ROW_BYTES
from kpt_optimize.rewrite import check_model

from .checkpoint import checkpoint_blocks, find_blocks, is_checkpointed
from .sizes import dense_parts, format_bytes, model_bytes

_CHANNELS_LAST: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


@dataclass(frozen=True, slots=True)
class ModelMemoryReport:
    """What `optimize_layout` or `optimize_model_memory` did.

    Attributes:
        changes: what happened to which parameters, buffers and blocks, under their names.
        bytes_before: of the storages of parameters, gradients and buffers before.
        bytes_after: and after.
    """

    changes: dict[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        names: dict[str, list[str]] = defaultdict(list)
        for name, what in self.changes.items():
            names[what].append(name)
        head = f"{format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} after"
        return "\n".join([head, *(f"  {len(each)} {what}: {', '.join(each)}" for what, each in names.items())])


def optimize_layout(model: nn.Module) -> ModelMemoryReport:
    """Lay out a model's parameters as tensor cores read them, in place; values and Parameter objects stay.

    Convolution weights become channels-last, other parameters contiguous, and bases that are not aligned to 16 bytes
    are copied to where they are. Left alone are parameters that share a storage with another tensor of the model, and
    expanded ones (laying them out would cost memory). A tensor outside the model that shares memory with a changed
    parameter stops sharing it. Of rows that are no multiple of 16 bytes `kpt_optimize.padding.advise` tells.

    Raises:
        InputError: `model` is no module.
    """
    check_model(model)
    before = model_bytes(model)
    formats = {
        id(module.weight): _CHANNELS_LAST[type(module)] for module in model.modules() if type(module) in _CHANNELS_LAST
    }
    tensors = [part for tensor in (*model.parameters(), *model.buffers()) for part in dense_parts(tensor)]
    users = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    changes = {}
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided or type(parameter.data) is not Tensor or parameter.numel() == 0:
            continue
        expanded = any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        if expanded or users[parameter.untyped_storage()._cdata] > 1:
            continue
        memory_format = formats.get(id(parameter), torch.contiguous_format)
        faults = []
        if not parameter.is_contiguous(memory_format=memory_format):
            faults.append(f"was not {'channels-last' if id(parameter) in formats else 'contiguous'}")
        if not parameter.is_meta and (rest := parameter.data_ptr() % ROW_BYTES):
            faults.append(f"began {rest} bytes after a multiple of {ROW_BYTES}")
        if faults:
            parameter.data = parameter.data.clone(memory_format=memory_format)
            changes[name] = " and ".join(faults)
    return ModelMemoryReport(changes, before, model_bytes(model))


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
    blocks = find_blocks(model, checkpoint) if checkpoint is not False else {}
    before = model_bytes(model)
    changes = {name: "lost a gradient" for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    for name in _shrink_storages(model):
        changes[name] = " and ".join(filter(None, (changes.get(name), "got a storage of its own")))
    if checkpoint is not False:
        already = {name for name, block in blocks.items() if is_checkpointed(block)}
        for name in checkpoint_blocks(model, "full", checkpoint) or blocks:
            if name not in already:
                changes[name] = "recomputed in the backward pass"
    return ModelMemoryReport(changes, before, model_bytes(model))


def _shrink_storages(model: nn.Module) -> Iterator[str]:
    """Give views of larger storages their own, and yield their names."""
    users: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is torch.strided and type(tensor.data) is Tensor:
            users[tensor.untyped_storage()._cdata][name] = tensor
    for named in users.values():
        tensors = list(named.values())
        needed = sum(tensor.nbytes for tensor in tensors)
        if needed < tensors[0].untyped_storage().nbytes() and not _overlap(tensors):
            for tensor in tensors:
                tensor.data = tensor.data.clone()
            yield from named


def _overlap(tensors: list[Tensor]) -> bool:
    """Return whether the ranges of memory that views of one storage span meet."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            start = tensor.storage_offset() * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((start, start + (last + 1) * tensor.itemsize))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))
