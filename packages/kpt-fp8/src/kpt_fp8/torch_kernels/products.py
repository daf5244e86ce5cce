"""Products with an 8-bit weight that is never whole in memory as anything else: some rows at a time stay in cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kpt_fp8.scales import BLOCKS, tiled

from .decode import decode_into, lacking

#: Numbers of a weight that are decoded at once: they are read again by the product while they are in cache.
_NUMBERS = 1 << 18
#: ... but as many rows as there are others to multiply with, up to so many: a product packs those others each time.
_ROWS = 512


def product(rows: Tensor, weight: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """Return `rows @ (weight * scale).t()`, for rows `[M, K]` float32 or float64: `[M, N]`.

    One scale for a row or all multiplies the sums, which are fewer.
    """
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for part, numbers in _parts(weight, scale, granularity, rows.dtype, rows.shape[0]):
        torch.mm(rows, numbers.t(), out=out[:, part])
    out.mul_(lacking(weight.dtype))
    return out.mul_(scale) if _outside(granularity) else out


def transposed_product(rows: Tensor, weight: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """`rows @ (weight * scale)`, for `rows` `[M, N]`: `[M, K]`."""
    if _outside(granularity):
        rows = rows * scale
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for part, numbers in _parts(weight, scale, granularity, rows.dtype, rows.shape[0]):
        out.addmm_(rows[:, part], numbers)
    return out.mul_(lacking(weight.dtype))


def _outside(granularity: str) -> bool:
    return BLOCKS[granularity][1] is None


def _parts(
    weight: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype, others: int
) -> Iterator[tuple[slice, Tensor]]:
    """Which rows of the weight, and their numbers without what is `lacking`, scaled unless that is done outside."""
    height = BLOCKS[granularity][0] or 1
    least = max(_NUMBERS // max(weight.shape[1], 1), min(others, _ROWS), 1)
    many = -(-least // height) * height
    room = scale.new_empty(min(many, weight.shape[0]), weight.shape[1], dtype=dtype)
    for start in range(0, weight.shape[0], many):
        part = slice(start, min(start + many, weight.shape[0]))
        numbers = room[: part.stop - start]
        decode_into(numbers, weight[part])
        if not _outside(granularity):
            blocks, factors = tiled(numbers, scale[start // height : -(-part.stop // height)], granularity)
            blocks.mul_(factors)
        yield part, numbers
