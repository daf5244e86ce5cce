"""The grouped products of `_loops` for devices whose memory the host can't read without waiting.

Shapes depend on shapes alone here, never on the offsets. Being implementations of the same torch library ops, they are
one node each to torch.compile and torch.export, with the ops' own fake: torch's fake of its grouped product refuses
dtypes that the product takes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ._loops import _library
from .permutation import inside

#: What `torch.nn.functional.grouped_mm` (torch >= 2.10) multiplies.
_NATIVE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Bytes to which torch's grouped product wants addresses and strides to be aligned.
_ALIGNMENT = 16
#: Rows per tile where no native grouped product exists: few enough to waste little on small experts.
_TILE = 64
#: Bytes that one expert's matrix per tile may take at a time.
_WORKSPACE = 256 * 2**20


@torch.library.impl(_library, "grouped_mm", "CompositeExplicitAutograd")
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`moe.grouped_mm`."""
    product = _native(x, weight)
    if product is None:
        return _tiled_mm(x, weight, offsets)
    return torch.where(inside(offsets, x.shape[0]).unsqueeze(1), product(_fit(x), _fit(weight), offs=offsets), 0)


@torch.library.impl(_library, "grouped_mm_wgrad", "CompositeExplicitAutograd")
def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """`moe.grouped_mm_wgrad`."""
    product = _native(x, grad)
    if product is None:
        return _tiled_wgrad(x, grad, offsets)
    return product(_fit(x).t(), _fit(grad), offs=offsets)


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


def _tiles(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the rows into tiles of one expert each, without knowing on the host where the experts end.

    Returns:
        The expert of each tile `[tiles]`, the row of each place in it `[tiles, _TILE]` (clamped to valid rows), and
        whether that place is taken `[tiles, _TILE]`. The number of tiles is the upper bound `rows / _TILE + experts`.
    """
    num_experts = offsets.shape[0]
    ends = offsets.long()
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    last_tile = torch.cumsum((ends - starts + _TILE - 1) // _TILE, 0)
    tile = torch.arange(rows // _TILE + num_experts, device=offsets.device)
    expert = torch.searchsorted(last_tile, tile, right=True).clamp(max=num_experts - 1)
    first_tile = last_tile - (ends - starts + _TILE - 1) // _TILE
    first_row = starts[expert] + (tile - first_tile[expert]) * _TILE
    row = first_row.unsqueeze(1) + torch.arange(_TILE, device=offsets.device)
    taken = (row < ends[expert].unsqueeze(1)) & (tile < last_tile[-1]).unsqueeze(1)
    return expert, row.clamp(max=max(rows - 1, 0)), taken


def _chunks(rows: int, offsets: Tensor, matrix: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The tiles, as many at a time as matrices of `matrix` bytes fit the workspace."""
    size = max(1, _WORKSPACE // max(matrix, 1))
    yield from zip(*(part.split(size) for part in _tiles(rows, offsets)), strict=True)


def _tiled_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """For dtypes and versions without a native product: a batched product over tiles, static in shape."""
    rows, inner, columns = x.shape[0], *weight.shape[1:]
    out = x.new_zeros(rows + 1, columns)  # the last row takes what no row owns
    if rows > 0:
        for expert, row, taken in _chunks(rows, offsets, inner * columns * x.element_size()):
            y_tiles = torch.bmm(torch.where(taken.unsqueeze(-1), x[row], 0), weight[expert])
            out.index_copy_(0, torch.where(taken, row, rows).flatten(), y_tiles.flatten(0, 1))
    return out[:rows]


def _tiled_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    # An expert has many tiles: their sum must not be rounded at each of them.
    total = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = torch.zeros(offsets.shape[0], x.shape[1], grad.shape[1], dtype=total, device=x.device)
    if x.shape[0] > 0:
        for expert, row, taken in _chunks(x.shape[0], offsets, x.shape[1] * grad.shape[1] * total.itemsize):
            x_tiles, grad_tiles = (torch.where(taken.unsqueeze(-1), t[row], 0) for t in (x, grad))
            out.index_add_(0, expert, torch.bmm(x_tiles.transpose(1, 2), grad_tiles).to(total))
    return out.to(x.dtype)
