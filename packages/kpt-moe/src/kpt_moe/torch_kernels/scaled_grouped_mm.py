"""`moe.scaled_grouped_mm`: dequantising one expert's matrix, or a bounded workspace of them, at a time."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_moe._dtypes import wide_dtype
from kpt_moe._scales import dequantise, spread
from kpt_moe.scaled_grouped_mm import result_dtype, scaled_grouped_mm

from .dequantised import DequantisedMatrices
from .grouped_mm import segments
from .tiles import chunks


def loop(call: Call) -> Tensor:
    """In host memory, one expert after the other."""
    x, weight, wide = call.x, call.weight, _wide(call)
    out: Tensor = x.new_empty(x.shape[0], weight.shape[2], dtype=result_dtype(x, call.out_dtype))
    matrix = DequantisedMatrices(weight, _scale(call), wide)
    end = 0
    for expert, start, end in segments(call.offsets):
        own = None if call.x_scale is None else call.x_scale[start:end]
        out[start:end] = _widen(x[start:end], own, wide) @ matrix[expert]
    out[end:].zero_()
    return out


def tiled(call: Call) -> Tensor:
    """In tiles, static in shape, for devices that the host would wait for."""
    weight, wide, scale = call.weight, _wide(call), _scale(call)
    rows, (_, inner, columns) = call.x.shape[0], weight.shape
    # The last row takes what no row owns.
    out: Tensor = call.x.new_zeros(rows + 1, columns, dtype=result_dtype(call.x, call.out_dtype))
    if rows > 0:
        x = _widen(call.x, call.x_scale, wide)
        for expert, row, taken in chunks(rows, call.offsets, inner * columns * wide.itemsize):
            matrix = dequantise(weight.index_select(0, expert), scale.index_select(0, expert), wide)
            y = torch.bmm(torch.where(taken.unsqueeze(-1), x[row], 0), matrix).to(out.dtype)
            out.index_copy_(0, torch.where(taken, row, rows).flatten(), y.flatten(0, 1))
    return out[:rows]


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradient of `x`, the one argument that has one."""
    grad_x = scaled_grouped_mm(grad, call.weight.mT, _scale(call).mT, call.offsets, out_dtype=call.x.dtype)
    return {"x": grad_x}


def _wide(call: Call) -> torch.dtype:
    return wide_dtype(call.x.dtype, result_dtype(call.x, call.out_dtype))


def _scale(call: Call) -> Tensor:
    return call.scale.unsqueeze(1) if call.scale.dim() == 2 else call.scale  # type: ignore[no-any-return]


def _widen(x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x_scale is None else x.to(dtype) * spread(x_scale.to(dtype), x.shape[1], -1)
