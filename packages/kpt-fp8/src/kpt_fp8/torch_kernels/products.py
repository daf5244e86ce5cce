"""Products with an 8-bit weight that is never whole in memory as anything else: some rows at a time stay in cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kpt_fp8.scales import BLOCKS, tiled

from .decode import decode

#: Bytes of a weight's rows that are decoded at once: they are read again by the product while they are in cache.
_BYTES = 4 << 20
#: ... and rows, a multiple of the rows of a block.
_ROWS = 128


def product(rows: Tensor, weight: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """`rows @ (weight * scale).t()`.

    Args:
        rows: `[M, K]` float32 or float64.
        weight: `[N, K]` of an 8-bit format.
        scale: of the weight, of `rows`' dtype.
        granularity: what shares a scale. One for a row or all multiplies the sums, which are fewer.

    Returns:
        `[M, N]` of `rows`' dtype.
    """
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for part, numbers in _parts(weight, scale, granularity, rows.dtype):
        torch.mm(rows, numbers.t(), out=out[:, part])
    return out.mul_(scale) if _outside(granularity) else out


def transposed_product(rows: Tensor, weight: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """`rows @ (weight * scale)`, for `rows` `[M, N]`: `[M, K]`."""
    if _outside(granularity):
        rows = rows * scale
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for part, numbers in _parts(weight, scale, granularity, rows.dtype):
        out.addmm_(rows[:, part], numbers)
    return out


def _outside(granularity: str) -> bool:
    return BLOCKS[granularity][1] is None


def _parts(weight: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Which rows of the weight, and their numbers, scaled unless that is done outside."""
    size = weight.shape[1] * dtype.itemsize
    many = max(_BYTES // max(size, 1) // _ROWS, 1) * _ROWS
    for start in range(0, weight.shape[0], many):
        part = slice(start, min(start + many, weight.shape[0]))
        numbers = decode(weight[part]).to(dtype)
        if not _outside(granularity):
            height = BLOCKS[granularity][0] or 1
            own = scale[start // height : -(-part.stop // height)]
            blocks, factors = tiled(numbers, own, granularity)
            blocks.mul_(factors)
        yield part, numbers
