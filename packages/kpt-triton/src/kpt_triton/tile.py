"""How a product is cut into tiles, and how a tile is compiled."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch

_WRITTEN = re.compile(r"(\d+)x(\d+)x(\d+) w(\d+) s(\d+)(?: g(\d+))?(?: r(\d+))?( tma)?( ws)?")

#: Columns of the narrowest tile.
_NARROWEST = 16

#: Between these a limit makes sense to NVIDIA's assembler.
_FEWEST_REGISTERS, _MOST_REGISTERS = 32, 248


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of a kernel for grouped products. Written as `128x128x64 w8 s3 g8 r128 tma ws`.

    Attributes:
        m: rows of a tile; a power of two, at least 16.
        n: columns of a tile; a power of two, at least 16. Where a kernel computes gate and up it has as many of each.
        k: how far a step goes along the inner size (in gradients of weights: along the rows); a power of two from 16.
        warps: warps (waves) of a program.
        stages: steps whose loads are under way at the same time.
        group: tiles one above the other that are computed side by side, so that they share weights in the L2 cache.
        descriptors: load by descriptors (NVIDIA's TMA from sm90) what is not gathered and is aligned.
        specialize: give loads and products warps of their own; for products both of whose operands have descriptors.
        registers: the most that a thread may have, so that a processor holds more programs; 0 leaves it to the
            compiler. Chips other than NVIDIA's have no such limit and leave it out.

    Raises:
        ValueError: a size is no power of two or too small, or there are no such registers.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8
    descriptors: bool = False
    specialize: bool = False
    registers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("m", 16), ("n", 16), ("k", 16), ("warps", 1), ("stages", 1), ("group", 1)):
            value = getattr(self, name)
            if value < least or (name != "stages" and value & (value - 1)):
                power = "" if name == "stages" else "a power of two "
                raise ValueError(f"Tile: {name} must be {power}from {least} up; got {value}")
        if self.registers and (self.registers % 8 or not _FEWEST_REGISTERS <= self.registers <= _MOST_REGISTERS):
            allowed = f"0 or a multiple of 8 from {_FEWEST_REGISTERS} to {_MOST_REGISTERS}"
            raise ValueError(f"Tile: registers must be {allowed}; got {self.registers}")
        if self.specialize and not self.descriptors:
            raise ValueError("Tile: specialize=True needs descriptors=True; got False")

    def __str__(self) -> str:
        limit = f" r{self.registers}" if self.registers else ""
        marks = (" tma" if self.descriptors else "") + (" ws" if self.specialize else "")
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} g{self.group}{limit}{marks}"

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Self:
        """The tile that is written so.

        Raises:
            ValueError: `text` is not of that form, or no such tile can be.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no tile; expected the form '128x128x64 w8 s3 g8 r128 tma ws'")
        *sizes, registers, descriptors, specialize = match.groups()
        m, n, k, warps, stages, group = (int(size or 8) for size in sizes)
        return cls(m, n, k, warps, stages, group, bool(descriptors), bool(specialize), int(registers or 0))

    def options(self) -> dict[str, Any]:
        """What a launch gives to the compiler."""
        found: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        # Other vendors' Tritons refuse options that they do not know.
        if self.registers and torch.version.hip is None and torch.version.xpu is None:
            found["maxnreg"] = self.registers
        return found


def narrowed(tile: Tile, columns: int, programs: int) -> Tile:
    """Return the tile, as narrow as it takes to have about so many of them, if it is one for few rows."""
    width = tile.n
    while tile.m <= 32 and width > _NARROWEST and 4 * -(-columns // width) < 3 * programs:
        width //= 2
    return replace(tile, n=width)
