"""Tiles of rows that one expert owns, cut without knowing on the host where the experts end."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Rows per tile: few enough to waste little on small experts.
_TILE = 64
#: Bytes that one expert's matrix per tile may take at a time.
_WORKSPACE = 256 * 2**20


def tiles(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the rows into tiles of one expert each; shapes depend on shapes alone.

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


def chunks(rows: int, offsets: Tensor, matrix: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The tiles, as many at a time as matrices of `matrix` bytes fit the workspace."""
    if offsets.shape[0] == 0:
        return
    size = max(1, _WORKSPACE // max(matrix, 1))
    yield from zip(*(part.split(size) for part in tiles(rows, offsets)), strict=True)
