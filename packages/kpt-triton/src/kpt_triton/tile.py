"""How a product is cut into tiles, and how a tile is compiled."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

_WRITTEN = re.compile(r"(\d+)x(\d+)x(\d+) w(\d+) s(\d+)(?: g(\d+))?( tma)?( ws)?")

#: Columns of the narrowest tile.
_NARROWEST = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of a kernel for grouped products. Written as `128x128x64 w8 s3 g8 tma ws`.

    Attributes:
        m: rows of a tile; a power of two, at least 16.
        n: columns of a tile; a power of two, at least 16. Where a kernel computes gate and up it has as many of each.
        k: how far a step goes along the inner size (in gradients of weights: along the rows); a power of two from 16.
        warps: warps (waves) of a program.
        stages: steps whose loads are under way at the same time.
        group: tiles one above the other that are computed side by side, so that they share weights in the L2 cache.
        descriptors: load by descriptors (NVIDIA's TMA from sm90) what is not gathered and is aligned.
        specialize: give loads and products warps of their own; for products both of whose operands have descriptors.

    Raises:
        ValueError: a size is no power of two, or too small.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8
    descriptors: bool = False
    specialize: bool = False

    def __post_init__(self) -> None:
        for name, least in (("m", 16), ("n", 16), ("k", 16), ("warps", 1), ("stages", 1), ("group", 1)):
            value = getattr(self, name)
            if value < least or (name != "stages" and value & (value - 1)):
                power = "" if name == "stages" else "a power of two "
                raise ValueError(f"Tile: {name} must be {power}from {least} up; got {value}")
        if self.specialize and not self.descriptors:
            raise ValueError("Tile: specialize=True needs descriptors=True; got False")

    def __str__(self) -> str:
        marks = (" tma" if self.descriptors else "") + (" ws" if self.specialize else "")
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} g{self.group}{marks}"

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Self:
        """The tile that is written so.

        Raises:
            ValueError: `text` is not of that form, or no such tile can be.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no tile; expected the form '128x128x64 w8 s3 g8 tma ws'")
        *sizes, descriptors, specialize = match.groups()
        m, n, k, warps, stages, group = (int(size or 8) for size in sizes)
        return cls(m, n, k, warps, stages, group, bool(descriptors), bool(specialize))

    def options(self) -> dict[str, Any]:
        """What a launch gives to the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def narrowed(tile: Tile, columns: int, programs: int) -> Tile:
    """Return the tile, as narrow as it takes to have about so many of them, if it is one for few rows."""
    width = tile.n
    while tile.m <= 32 and width > _NARROWEST and 4 * -(-columns // width) < 3 * programs:
        width //= 2
    return replace(tile, n=width)
