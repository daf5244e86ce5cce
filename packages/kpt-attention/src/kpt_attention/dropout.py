"""Draw which probabilities dropout keeps, from a seed, an offset and the place alone: a backward draws them anew.

The generator is SplitMix64 (Steele, Lea, Flood 2014) of a counter: any part of a mask can be made by itself.
"""

import torch
from torch import Tensor

from kpt_core import Call

_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # int64 shifts its sign in


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def seed_of(call: Call) -> int | Tensor:
    """Return the seed of a call of `attention.dense`, which a tensor adds to where it was drawn in a compiled graph."""
    return call.seed if call.drawn_seed is None else call.drawn_seed + call.seed  # type: ignore[no-any-return]


def kept(rate: float, seed: int | Tensor, offset: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which places of `rows` and `columns`, int64 tensors that broadcast, are kept, as bool.

    Args:
        rate: of those that are dropped, below 1.
        seed: of the generator.
        offset: another one gives other numbers of the same seed.
        rows: number of a sequence's, head's and query's row among all of the call.
        columns: keys.
    """
    return kept_from(least_of(rate), start_of(seed, offset, rows.device), rows, columns)


def least_of(rate: float) -> int:
    """Return the least number of 24 bits that is kept."""
    return int(rate * (1 << 24))


def start_of(seed: int | Tensor, offset: int, device: torch.device) -> Tensor:
    """Return where the generator begins, int64 `[]`: made on the device, which nothing is copied to."""
    given = seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)
    return _mixed(given.to(device, torch.int64) * _INCREMENT + offset)


def kept_from(least: int, start: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return what `kept` does, from `least_of` and `start_of`."""
    drawn = _mixed(_mixed(start + rows * _INCREMENT) + columns * _INCREMENT)
    return _shifted(drawn, 40) >= least
