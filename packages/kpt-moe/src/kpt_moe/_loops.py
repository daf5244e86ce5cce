"""Loops over experts for tensors in host memory, where reading the offsets costs nothing.

They are torch library ops, so that torch.compile and torch.export see one node each and need not trace the loop. Their
autograd lies above, in the ops that call them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_library = torch.library.Library("kpt_moe", "DEF")
_library.define("grouped_mm(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
_library.define("grouped_mm_wgrad(Tensor x, Tensor grad, Tensor offsets) -> Tensor")


def segments(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, start, end
            start = end


@torch.library.impl(_library, "grouped_mm", "CPU")
def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    end = 0
    with torch.no_grad():
        for expert, start, end in segments(offsets):
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        out[end:].zero_()
    return out


@torch.library.impl(_library, "grouped_mm_wgrad", "CPU")
def _grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_zeros(offsets.shape[0], x.shape[1], grad.shape[1])
    with torch.no_grad():
        for expert, start, end in segments(offsets):
            torch.mm(x[start:end].t(), grad[start:end], out=out[expert])
    return out


@torch.library.register_fake("kpt_moe::grouped_mm", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_mm_fake(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.register_fake("kpt_moe::grouped_mm_wgrad", lib=_library)  # type: ignore[untyped-decorator]
def _grouped_mm_wgrad_fake(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.kpt_moe.grouped_mm.default
grouped_mm_wgrad: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.kpt_moe.grouped_mm_wgrad.default
