"""How well quantised numbers stand for the exact ones: signal-to-quantisation-noise ratio (SQNR) in decibels."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kpt_core import InputError


@dataclass(frozen=True, slots=True)
class Quality:
    """SQNR in dB: 10 log10 of the sum of squares over that of the errors; infinite where all is exact.

    `worst_row_sqnr` is the least over a row: one bad row can hide in `sqnr`.
    """

    sqnr: float
    worst_row_sqnr: float


class QualityMeter:
    """Sums up squares and squared errors in float64, some rows at a time."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self._worst = math.inf
        self.called = 0

    def add(self, exact: Tensor, approximate: Tensor) -> None:
        """Count some rows, `[..., K]` floating; raise `InputError` where the shapes differ."""
        if exact.shape != approximate.shape:
            raise InputError(
                "sqnr: exact and approximate must have one shape; "
                f"got {list(exact.shape)} and {list(approximate.shape)}: give what stands for the same numbers"
            )
        self.called += 1
        if exact.numel() == 0:
            return
        # In place, in copies, one after the other: eight bytes a number beside what is given.
        signals = exact.detach().to(torch.float64, copy=True).square_().sum(-1)
        noises = exact.detach().to(torch.float64, copy=True).sub_(approximate.detach()).square_().sum(-1)
        self._signal += float(signals.sum())
        self._noise += float(noises.sum())
        ratio = torch.where(noises == 0, math.inf, signals / noises)
        # NaN is kept by `amin`; max and min of Python would lose it.
        worst = float(ratio.amin())
        self._worst = worst if math.isnan(worst) else min(self._worst, worst)

    def result(self) -> Quality:
        """Of all rows so far."""
        ratio = math.inf if self._noise == 0 else self._signal / self._noise
        return Quality(_decibels(ratio), _decibels(self._worst))


def sqnr(exact: Tensor, approximate: Tensor) -> Quality:
    """Measure how well numbers `[..., K]` stand for others; raise `InputError` where the shapes differ."""
    meter = QualityMeter()
    meter.add(exact, approximate)
    return meter.result()


def _decibels(ratio: float) -> float:
    if ratio == 0:
        return -math.inf
    return ratio if math.isinf(ratio) else 10 * math.log10(ratio)
