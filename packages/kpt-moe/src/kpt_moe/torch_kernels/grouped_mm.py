"""`moe.grouped_mm` and `moe.grouped_mm_wgrad`: loops in host memory, torch's own product or tiles elsewhere.

Elsewhere shapes depend on shapes alone, never on the offsets, which the host would wait for.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import Call
from kpt_moe._dtypes import wide_dtype
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_moe.permutation import inside

from .tiles import chunks

#: What `torch.nn.functional.grouped_mm` (torch >= 2.10) multiplies.
_NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Bytes to which torch's grouped product wants addresses and strides to be aligned.
_ALIGNMENT = 16


def segments(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, start, end
            start = end


def loop(call: Call) -> Tensor:
    """`moe.grouped_mm`, one expert after the other."""
    x, weight, offsets = call[:3]
    out: Tensor = x.new_empty(x.shape[0], weight.shape[2])
    end = 0
    for expert, start, end in segments(offsets):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
    out[end:].zero_()
    return out


def loop_wgrad(call: Call) -> Tensor:
    """`moe.grouped_mm_wgrad`, one expert after the other."""
    x, grad, offsets = call[:3]
    out: Tensor = x.new_zeros(offsets.shape[0], x.shape[1], grad.shape[1])
    for expert, start, end in segments(offsets):
        torch.mm(x[start:end].t(), grad[start:end], out=out[expert])
    return out


def product(call: Call) -> Tensor:
    """`moe.grouped_mm`, by torch's grouped product where it takes the operands, else in tiles."""
    x, weight, offsets = call[:3]
    native = _native(x, weight)
    if native is None or offsets.shape[0] == 0:
        return _tiled_mm(x, weight, offsets)
    return torch.where(inside(offsets, x.shape[0]).unsqueeze(1), native(_fit(x), _fit(weight), offs=offsets), 0)


def product_wgrad(call: Call) -> Tensor:
    """`moe.grouped_mm_wgrad`, likewise."""
    x, grad, offsets = call[:3]
    native = _native(x, grad)
    if native is None or offsets.shape[0] == 0:
        return _tiled_wgrad(x, grad, offsets)
    return native(_fit(x).t(), _fit(grad), offs=offsets)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Of `moe.grouped_mm`."""
    grads = {}
    if "x" in call.needs:
        grads["x"] = grouped_mm(grad, call.weight.mT, call.offsets)
    if "weight" in call.needs:
        grads["weight"] = wgrad_like(call.weight, call.x, grad, call.offsets)
    return grads


def backward_wgrad(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Of `moe.grouped_mm_wgrad`."""
    grads = {}
    if "x" in call.needs:
        grads["x"] = grouped_mm(call.grad, grad.mT, call.offsets)
    if "grad" in call.needs:
        grads["grad"] = grouped_mm(call.x, grad, call.offsets)
    return grads


def wgrad_like(weight: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The weights' gradient in the weights' own memory order, which spares autograd a copy."""
    if weight.stride(1) < weight.stride(2):
        return grouped_mm_wgrad(grad, x, offsets).mT
    return grouped_mm_wgrad(x, grad, offsets)


def _native(x: Tensor, other: Tensor) -> Callable[..., Tensor] | None:
    """The grouped product of torch itself, if it takes operands of such dtypes and sizes."""
    sizes = (x.shape[-1], other.shape[-1])
    if x.shape[0] == 0 or any(size == 0 or size * x.element_size() % _ALIGNMENT for size in sizes):
        return None
    if hasattr(F, "grouped_mm"):
        return F.grouped_mm if x.dtype in _NATIVE_DTYPES else None
    # torch 2.8 and 2.9 have it under this name, for one dtype and, in 2.8, one generation of devices.
    if x.dtype is torch.bfloat16 and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0):
        return getattr(torch, "_grouped_mm", None)
    return None


def _fit(operand: Tensor) -> Tensor:
    """The operand, or a copy where its address or strides are none that torch's grouped product takes."""
    *batch, outer, inner = operand.stride()
    rows, columns = operand.shape[-2:]
    step = outer if inner == 1 and outer >= columns else inner if outer == 1 and inner >= rows else 1
    places = (operand.data_ptr(), *(stride * operand.element_size() for stride in (*batch, step)))
    if all(place % _ALIGNMENT == 0 for place in places):
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def _tiled_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """For dtypes and versions without a native product: a batched product over tiles, static in shape."""
    rows, inner, columns = x.shape[0], *weight.shape[1:]
    out = x.new_zeros(rows + 1, columns)  # the last row takes what no row owns
    if rows > 0:
        for expert, row, taken in chunks(rows, offsets, inner * columns * x.element_size()):
            y_tiles = torch.bmm(torch.where(taken.unsqueeze(-1), x[row], 0), weight[expert])
            out.index_copy_(0, torch.where(taken, row, rows).flatten(), y_tiles.flatten(0, 1))
    return out[:rows]


def _tiled_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    # An expert has many tiles: neither what one gives nor the sum so far may be rounded.
    total = wide_dtype(x.dtype)
    out = torch.zeros(offsets.shape[0], x.shape[1], grad.shape[1], dtype=total, device=x.device)
    if x.shape[0] > 0:
        for expert, row, taken in chunks(x.shape[0], offsets, x.shape[1] * grad.shape[1] * total.itemsize):
            x_tiles, grad_tiles = (torch.where(taken.unsqueeze(-1), t[row], 0).to(total) for t in (x, grad))
            out.index_add_(0, expert, torch.bmm(x_tiles.mT, grad_tiles))
    return out.to(x.dtype)
