"""How products are cut into tiles: by sizes and dtype alone, so that nothing of JAX is imported for it.

A tile and its pipeline fit in 16 MiB, what XLA gives a kernel of a core's VMEM by default on every chip. Tiles are as
large as leaves most sums in registers: what is kept in VMEM for lack of them is bounded by the contracts of
`kpt_backend_tpu.moe.programs`. None of it was measured: no TPU has run it.
"""

from typing import NamedTuple

#: Row tiles that JAX's grouped kernels count rightly, see `kpt_backend_tpu.pallas.grouped_mm`.
MOST_TILES = 4096
#: Lanes of a vector register, and columns of the smallest matrix unit: inner sizes and columns come in these.
LANES = 128
_FEWEST_ROWS = 32


class Tile(NamedTuple):
    """Sizes of one tile of a product `[rows, inner] @ [inner, columns]`."""

    rows: int
    inner: int
    columns: int


#: The largest tile by bytes of an element: float32 is multiplied in six passes.
_LARGEST = {2: Tile(512, 512, 512), 4: Tile(256, 256, 128)}


def most_rows(itemsize: int) -> int:
    """Return how many rows JAX's grouped kernels multiply rightly, of elements of so many bytes."""
    return MOST_TILES * _LARGEST[itemsize].rows


def tile_of(rows: int, groups: int, inner: int, columns: int, itemsize: int) -> Tile:
    """Return the tile of a grouped product.

    Rows are about those of a group, so that a group of few rows is not padded to many.

    Args:
        rows: of all groups, `most_rows` at most.
        groups: their number.
        inner: what is summed over.
        columns: of the result.
        itemsize: bytes of an element of the operands, 2 or 4.
    """
    largest = _LARGEST[itemsize]
    per_group = -(-rows // max(groups, 1))
    tall = min(max(_power_of_two(per_group), _FEWEST_ROWS), largest.rows)
    while -(-rows // tall) > MOST_TILES and tall < largest.rows:
        tall *= 2
    return Tile(tall, _whole(inner, largest.inner), _whole(columns, largest.columns))


def _whole(size: int, most: int) -> int:
    """Return a size in whole lanes, `most` at most."""
    return min(-(-size // LANES) * LANES, most)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


#: Rows and columns of the blocks whose bits a plan of `attention.dense` keeps.
BLOCK = 128
#: Queries and keys of the largest tile of attention, by bytes of an element. Smaller ones wait more for what is read
#: ahead of each step; larger ones keep more scores in VMEM than fit in registers many times over.
_LARGEST_OF_ATTENTION = {2: 512, 4: 256}


def attention_tile(queries: int, keys: int, itemsize: int, blocks: bool) -> tuple[int, int]:
    """Return the queries and keys of a tile of attention: whole blocks, one where a plan has bits of them."""
    most = BLOCK if blocks else _LARGEST_OF_ATTENTION[itemsize]
    return min(-(-queries // BLOCK) * BLOCK, most), min(-(-keys // BLOCK) * BLOCK, most)
