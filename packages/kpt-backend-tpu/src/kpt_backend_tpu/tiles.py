"""How products are cut into tiles: by sizes and dtype alone, so that nothing of JAX is imported for it.

A tile and its pipeline must fit in 16 MiB, what XLA gives a kernel of a core's VMEM by default on every chip.
"""

from typing import NamedTuple

#: Row tiles that JAX's grouped kernels count rightly, see `kpt_backend_tpu.pallas.grouped_mm`.
MOST_TILES = 4096
#: Lanes of a vector register, and columns of the smallest matrix unit: inner sizes and columns come in these.
LANES = 128
_FEWEST_ROWS, _TALLEST = 32, 512
#: Rows that JAX's grouped kernels multiply rightly.
MOST_ROWS = MOST_TILES * _TALLEST


class Tile(NamedTuple):
    """Sizes of one tile of a product `[rows, inner] @ [inner, columns]`."""

    rows: int
    inner: int
    columns: int


def tile_of(rows: int, groups: int, inner: int, columns: int, itemsize: int) -> Tile:
    """Return the tile of a grouped product.

    Rows are about those of a group, so that a group of few rows is not padded to many. None of it was measured: no TPU
    has run it.

    Args:
        rows: of all groups.
        groups: their number.
        inner: what is summed over.
        columns: of the result.
        itemsize: bytes of an element of the operands.
    """
    per_group = -(-rows // max(groups, 1))
    tall = min(max(_power_of_two(per_group), _FEWEST_ROWS), _TALLEST)
    while -(-rows // tall) > MOST_TILES and tall < _TALLEST:
        tall *= 2
    wide = 1024 if itemsize <= 2 else 512
    return Tile(tall, _whole(inner, wide), _whole(columns, wide))


def _whole(size: int, most: int) -> int:
    """Return a size in whole lanes, `most` at most."""
    return min(-(-size // LANES) * LANES, most)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
