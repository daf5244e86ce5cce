"""The layout of a model's parameters, made as tensor cores read them."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kpt_optimize.rewrite import check_model

from .sizes import dense_parts, format_bytes, model_tensors, storage_bytes

#: Bytes that vector loads, TMA descriptors and cuBLAS's tensor-core kernels want rows and base addresses to be
#: multiples of (CUDA C++ programming guide, tensor map; cuBLAS documentation, tensor core usage).
ALIGNMENT = 16

_CHANNELS_LAST: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """What `optimize_layout` did.

    Attributes:
        changes: what was changed, under each parameter's name.
        moved_bytes: bytes of the parameters that were laid out anew.
        bytes_before: bytes of the model's storages before.
        bytes_after: and after.
    """

    changes: dict[str, str] = field(default_factory=dict)
    moved_bytes: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        head = (
            f"{len(self.changes)} parameters ({format_bytes(self.moved_bytes)}) laid out anew, "
            f"{format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} after"
        )
        return "\n".join([head, *(f"  {name}: {text}" for name, text in self.changes.items())])


def optimize_layout(model: nn.Module) -> LayoutReport:
    """Lay out a model's parameters as tensor cores read them, in place; values and Parameter objects stay.

    Convolution weights become channels-last, other parameters contiguous, and bases that are not aligned to 16 bytes
    are copied to where they are. Left alone are parameters that share a storage with another tensor of the model, and
    expanded ones (laying them out would cost memory). A tensor outside the model that shares memory with a changed
    parameter stops sharing it. Of rows that are no multiple of 16 bytes `kpt_optimize.padding.advise` tells.

    Raises:
        InputError: `model` is no module.
    """
    check_model(model)
    before = storage_bytes(model_tensors(model))
    formats = {
        id(module.weight): _CHANNELS_LAST[type(module)] for module in model.modules() if type(module) in _CHANNELS_LAST
    }
    users = Counter(
        part.untyped_storage()._cdata
        for tensor in [*model.parameters(), *model.buffers()]
        for part in dense_parts(tensor)
    )
    changes, moved = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided or type(parameter.data) is not Tensor or parameter.numel() == 0:
            continue
        memory_format = formats.get(id(parameter), torch.contiguous_format)
        expanded = any(size > 1 and not step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        faults = [] if expanded or users[parameter.untyped_storage()._cdata] > 1 else _faults(parameter, memory_format)
        if faults:
            parameter.data = parameter.data.clone(memory_format=memory_format)
            changes[name] = " and ".join(faults)
            moved += parameter.nbytes
    return LayoutReport(changes, moved, before, storage_bytes(model_tensors(model)))


def _faults(parameter: Tensor, memory_format: torch.memory_format) -> list[str]:
    faults = []
    if not parameter.is_contiguous(memory_format=memory_format):
        wanted = "contiguous" if memory_format is torch.contiguous_format else "channels-last"
        faults.append(f"was not {wanted}")
    if not parameter.is_meta and parameter.data_ptr() % ALIGNMENT:
        faults.append(f"began {parameter.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}")
    return faults
