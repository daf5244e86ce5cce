"""Which tiles the grouped products use where nothing was measured, and which ones are worth measuring.

The rows of a tile follow from the rows that an expert has on average: a tile that is taller than an expert wastes what
it is too tall. The rest follows from the chip. A step of a tile of m by n reads m + n numbers for m n products, so the
larger a tile, the less is asked of the L2 cache; what bounds it is that the sums, and all that is done with them in the
end, fit the registers of 8 warps without spilling. Stages are as many as hide a load's time and fit the memory.
`kpt_triton.moe.contracts` holds every tile of this file to that.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from kpt_triton.chips import INTERPRETER, chip_of, family_of
from kpt_triton.tile import Tile

#: The kinds of products. `pair` has a gate and an up projection, `slope` the derivative of the activation behind it,
#: `wgrad` is the gradient of weights. `crowded` ones are plain but for what takes registers too: scales by 128 or of K,
#: or an activation without a gate.
PRODUCTS = ("plain", "crowded", "pair", "slope", "wgrad")
#: Products of 8-bit numbers on both sides, multiplied as they are, where the chip does. `crowded_codes` have scales by
#: 128, for which the sums of a step have registers of their own, or an activation; `pair_codes` have a gate.
PRODUCTS_OF_CODES = ("codes", "crowded_codes", "pair_codes")

_AMPERE = {
    "plain": ("128x128x32 w8 s4 g8", "64x128x32 w4 s4 g8"),
    "crowded": ("128x128x32 w8 s4 g8", "64x64x32 w4 s4 g8"),
    "pair": ("128x64x32 w8 s4 g8", "64x64x32 w4 s4 g8"),
    "slope": ("64x64x32 w8 s4 g8", "64x64x32 w8 s4 g8"),
    "wgrad": ("128x128x32 w8 s4 g8", ""),
}
_HOPPER = {
    "plain": ("128x256x64 w8 s3 g8", "64x128x64 w4 s4 g8"),
    "crowded": ("128x128x64 w8 s3 g8", "64x128x64 w8 s3 g8"),
    "pair": ("128x64x64 w8 s3 g8", "64x64x64 w4 s4 g8"),
    "slope": ("128x128x64 w8 s3 g8", "64x128x64 w4 s4 g8"),
    "wgrad": ("128x256x64 w8 s3 g8", ""),
}
_CDNA = {
    "plain": ("128x128x32 w8 s2 g8", "64x128x32 w4 s2 g8"),
    "crowded": ("128x64x32 w8 s2 g8", "64x64x32 w4 s2 g8"),
    "pair": ("128x64x32 w8 s2 g8", "64x64x32 w4 s2 g8"),
    "slope": ("64x64x32 w8 s2 g8", "64x64x32 w8 s2 g8"),
    "wgrad": ("128x128x32 w8 s2 g8", ""),
}
#: A step of codes is as long as scales are of, 128: they take half the room, and what they sum up to is multiplied and
#: added once a step.
_CODES = dict.fromkeys(PRODUCTS_OF_CODES, ("128x128x128 w8 s3 g8", "64x128x128 w4 s3 g8")) | {
    "pair_codes": ("128x64x128 w8 s3 g8", "64x64x128 w4 s3 g8")
}
#: Warps of Intel's chips are of 16 threads.
_XE = {
    "plain": ("128x128x32 w32 s2 g8", "64x128x32 w16 s2 g8"),
    "crowded": ("128x64x32 w32 s2 g8", "64x64x32 w16 s2 g8"),
    "pair": ("128x64x32 w32 s2 g8", "64x64x32 w16 s2 g8"),
    "slope": ("64x64x32 w32 s2 g8", "64x64x32 w32 s2 g8"),
    "wgrad": ("128x128x32 w32 s2 g8", ""),
}
#: By family and product: the tile for experts of more than 64 rows, and for 33 to 64.
_TALL = {
    "sm80": _AMPERE,
    "sm86": _AMPERE | _CODES,
    "sm90": _HOPPER | _CODES,
    "sm100": _HOPPER | _CODES | {"codes": ("128x256x128 w8 s3 g8", "64x128x128 w4 s3 g8")},
    # Operands lie in registers there: two sums leave room for half a step of them.
    "sm120": _AMPERE | _CODES | {"pair_codes": ("128x64x64 w8 s4 g8", "64x64x64 w4 s4 g8")},
    "gfx9": _CDNA
    | dict.fromkeys(PRODUCTS_OF_CODES, ("128x128x128 w8 s2 g8", "64x128x128 w4 s2 g8"))
    | {"pair_codes": ("128x64x128 w8 s2 g8", "64x64x128 w4 s2 g8")},
    "gfx11": _CDNA
    | dict.fromkeys(PRODUCTS_OF_CODES, ("128x128x64 w8 s2 g8", "64x128x64 w4 s2 g8"))
    | {"pair_codes": ("128x64x64 w8 s2 g8", "64x64x64 w4 s2 g8")},
    "xe": _XE,
}
#: By family: n, k and stages for 16 and 32 rows, where reading the weights is what takes time.
_LOW = {
    "sm80": (64, 128, 4),
    "sm86": (64, 64, 4),
    "sm90": (64, 128, 4),
    "sm100": (64, 128, 4),
    "sm120": (64, 64, 4),
    "gfx9": (64, 64, 2),
    "gfx11": (64, 64, 2),
    "xe": (64, 64, 2),
}
#: By family and product: what is worth measuring beside the defaults. Only loads by descriptors have tiles of their own
#: warps, and not on sm90, where Triton 3.6 and 3.9 do not give them to this loop.
_MORE: dict[str, dict[str, tuple[str, ...]]] = {
    "sm80": {
        "plain": ("128x128x64 w8 s3 g8", "128x64x32 w8 s4 g8", "64x64x32 w4 s4 g8"),
        "pair": ("128x32x32 w8 s4 g8", "64x32x32 w4 s4 g8"),
        "slope": ("128x32x32 w8 s4 g8", "64x32x32 w4 s4 g8"),
        "wgrad": ("128x64x32 w8 s4 g8", "64x64x32 w4 s4 g8"),
    },
    "sm90": {
        "plain": (
            "128x128x64 w8 s3 g8", "64x64x64 w4 s4 g8", "128x256x64 w8 s3 g8 tma", "128x128x64 w8 s4 g8 tma",
            "64x128x64 w4 s4 g8 tma",
        ),
        "pair": ("64x128x64 w8 s3 g8", "64x32x64 w4 s4 g8", "128x64x64 w8 s4 g8 tma", "64x64x64 w4 s4 g8 tma"),
        "slope": (
            "64x64x64 w8 s3 g8", "64x32x64 w4 s4 g8", "64x64x64 w8 s4 g8 tma", "128x128x64 w8 s3 g8 tma",
        ),
        "wgrad": ("128x128x64 w8 s4 g8", "64x128x64 w4 s4 g8"),
    },
    "sm120": {
        "plain": ("128x128x32 w8 s4 g8 tma", "128x128x32 w8 s4 g8 tma ws"),
        "pair": ("128x64x32 w8 s4 g8 tma",),
        "slope": ("64x64x32 w8 s4 g8 tma",),
    },
    "gfx9": {
        "plain": ("128x64x32 w8 s2 g8", "64x64x32 w4 s2 g8"),
        "pair": ("64x32x32 w4 s2 g8",),
        "slope": ("64x32x32 w4 s2 g8",),
        "wgrad": ("128x64x32 w8 s2 g8",),
    },
}  # fmt: skip
_MORE["sm86"] = _MORE["gfx11"] = _MORE["xe"] = {}
_OWN_WARPS = ("128x256x64 w8 s3 g8 tma ws", "128x128x64 w8 s4 g8 tma ws")
_MORE["sm100"] = _MORE["sm90"] | {"plain": (*_MORE["sm90"]["plain"], *_OWN_WARPS)}

#: An operation of the interpreter takes as long for a large tile as for a small.
_INTERPRETED = Tile(64, 128, 128)


def is_aligned(*sizes: int) -> bool:
    """Whether rows of such sizes can be read in whole vectors: Triton sees it where they are multiples of 16."""
    return all(size % 16 == 0 for size in sizes)


def product_of(scales_of: str, *, codes: bool = False) -> str:
    """The kind of a plain product whose matrices have such scales ("" for none); `codes`: of 8-bit numbers as such."""
    if codes:
        return "crowded_codes" if scales_of == "block" else "codes"
    return "crowded" if scales_of in ("block", "k") else "plain"


@lru_cache(maxsize=4096)
def default_tile(product: str, chip: str, itemsize: int, rows: int, experts: int, aligned: bool = True) -> Tile:
    """The tile for a product where nothing was measured.

    Args:
        product: one of PRODUCTS or PRODUCTS_OF_CODES.
        chip: such as `sm90`.
        itemsize: bytes of an element of x: 4 or 2 (1 counts as 2).
        rows: of all experts together.
        experts: how many there are.
        aligned: whether rows can be read in vectors, see `is_aligned`.
    """
    if chip == INTERPRETER:
        return _INTERPRETED
    family = family_of(chip)
    height = _height(rows / max(experts, 1)) if product != "wgrad" else 128
    halved = product in ("pair", "slope", "pair_codes")
    if itemsize == 4 or not aligned:
        n = 32 if halved or family == "gfx11" else 64
        return _small(height, n if aligned or itemsize < 4 else n // 2, 3 if aligned and family.startswith("sm") else 2)
    if height > 32:
        return Tile.parse(_TALL[family][product][0 if height == 128 else 1])
    n, k, stages = _LOW[family]
    if product in ("crowded", "slope"):  # scales of K are multiplied into x, which has to fit beside what follows
        k = min(k, 32 if family == "gfx11" else 64)
    if product in PRODUCTS_OF_CODES:
        k = 128
    return Tile(height, n // 2 if halved else n, k, 4, stages, 1)


def _small(height: int, n: int, stages: int) -> Tile:
    """Where registers decide: each number of unaligned rows has its address, and float32 has no matrix instructions."""
    return Tile(32, n, 32, 4, stages, 1) if height <= 32 else Tile(64, n, 32, 8, stages)


def _height(rows_per_expert: float) -> int:
    """The least of 16, 32, 64 and 128 rows that holds an average expert."""
    return next((height for height in (16, 32, 64) if rows_per_expert <= height), 128)


def tile_for(
    product: str,
    x: Tensor,
    rows: int,
    matrices: Sequence[int],
    config: Mapping[str, str] | None = None,
    name: str = "tile",
) -> Tile:
    """The tile that a configuration has under a name, or the default where it has none.

    Args:
        product: one of PRODUCTS or PRODUCTS_OF_CODES.
        x: what is multiplied.
        rows: of all experts together.
        matrices: their shape, `[experts, K, N]` or with K and N exchanged.
        config: tiles as `kpt_triton.tile.Tile` writes them, by name.
        name: of this product's tile.

    Raises:
        ValueError: what is written there is no tile.
    """
    if config is not None and (written := config.get(name)):
        return Tile.parse(written)
    experts, *sizes = matrices
    return default_tile(product, chip_of(x.device), x.element_size(), rows, experts, is_aligned(*sizes))


def candidate_tiles(product: str, chip: str) -> tuple[Tile, ...]:
    """The tiles for 16-bit types that are worth measuring on a chip, the defaults among them."""
    found = {default_tile(product, chip, 2, rows, 1) for rows in (16, 32, 64, 1024)}
    found.update(map(Tile.parse, _MORE[family_of(chip)].get(product, ())))
    return tuple(sorted(found, key=str))
