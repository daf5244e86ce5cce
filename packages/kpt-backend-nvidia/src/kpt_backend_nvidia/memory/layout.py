"""The layout of a model's parameters: what is made better, and what only its owner can change."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .sizes import check_model, dense_parts, format_bytes, model_tensors, storage_bytes

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
        advice: what was left as it is and could be better, under each parameter's name.
        moved_bytes: bytes of the parameters that were laid out anew.
        bytes_before: bytes of the model's storages before.
        bytes_after: and after.
    """

    changes: dict[str, str] = field(default_factory=dict)
    advice: dict[str, str] = field(default_factory=dict)
    moved_bytes: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        lines = [
            f"{len(self.changes)} parameters ({format_bytes(self.moved_bytes)}) laid out anew, "
            f"{format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} after"
        ]
        lines += [f"  {name}: {text}" for name, text in self.changes.items()]
        lines += [f"  {name}: advice: {text}" for name, text in self.advice.items()]
        return "\n".join(lines)


def optimize_layout(model: nn.Module) -> LayoutReport:
    """Lay out a model's parameters as tensor cores read them, in place; values and Parameter objects stay.

    Convolution weights become channels-last, other parameters contiguous, and bases that are not aligned to 16 bytes
    are copied to where they are. Left alone with advice are parameters that share a storage with another tensor of the
    model, expanded ones (laying them out would cost memory), and rows that are no multiple of 16 bytes (their shape is
    the model's). A tensor outside the model that shares memory with a changed parameter stops sharing it.

    Raises:
        InputError: `model` is no module.
    """
    check_model("optimize_layout", model)
    before = storage_bytes(model_tensors(model))
    formats = {
        id(module.weight): _CHANNELS_LAST[type(module)]
        for module in model.modules()
        if type(module) in _CHANNELS_LAST and isinstance(module.weight, Tensor)
    }
    users = Counter(
        part.untyped_storage()._cdata
        for tensor in [*model.parameters(), *model.buffers()]
        for part in dense_parts(tensor)
    )
    # A kernel's width is no row of a matrix.
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    changes, advice, moved = {}, {}, 0
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided or type(parameter.data) is not Tensor or parameter.numel() == 0:
            continue
        memory_format = formats.get(id(parameter), torch.contiguous_format)
        if reasons := _faults(parameter, memory_format):
            if 0 in _strides(parameter):
                advice[name] = "is expanded; kernels read it well only as a copy, which costs memory"
            elif users[parameter.untyped_storage()._cdata] > 1:
                advice[name] = f"{' and '.join(reasons)}, but shares its storage with another tensor of the model"
            else:
                parameter.data = parameter.data.clone(memory_format=memory_format)
                changes[name] = " and ".join(reasons)
                moved += parameter.nbytes
        if name not in advice and id(parameter) not in convolutions and (text := _row_advice(parameter)):
            advice[name] = text
    return LayoutReport(changes, advice, moved, before, storage_bytes(model_tensors(model)))


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others' say nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _faults(parameter: Tensor, memory_format: torch.memory_format) -> list[str]:
    faults = []
    if not parameter.is_contiguous(memory_format=memory_format):
        wanted = "contiguous" if memory_format is torch.contiguous_format else "channels-last"
        faults.append(f"was not {wanted}")
    if not parameter.is_meta and parameter.data_ptr() % ALIGNMENT:
        faults.append(f"began {parameter.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}")
    return faults


def _row_advice(parameter: Tensor) -> str | None:
    if parameter.dim() < 2 or not parameter.is_contiguous():
        return None
    row = parameter.shape[-1] * parameter.itemsize
    if row % ALIGNMENT == 0 or row < ALIGNMENT:
        return None
    padded = -(-row // ALIGNMENT) * ALIGNMENT // parameter.itemsize
    return (
        f"rows of {parameter.shape[-1]} elements are {row} bytes, no multiple of {ALIGNMENT}: "
        f"{padded} elements would allow vector loads, TMA and tensor cores"
    )
