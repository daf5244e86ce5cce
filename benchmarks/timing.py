"""Timing in turn, and the interval of a ratio: what every benchmark of this repository measures by."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

#: Measures something once: seconds.
Timer = Callable[[], float]
CONFIDENCE = 0.99
#: Bytes that are written before each call on a GPU, so that nothing of the last one is left in a cache.
_FLUSHED = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the rounds' ratios and its interval: of the confidence, or the range of less than eight rounds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{'~' if self.low <= 1 <= self.high else ''}{self.value:.2f}x"


def interleaved(
    timers: Sequence[Timer], seconds: float = 0.6, rounds: int | None = None, most: int = 200
) -> list[list[float]]:
    """Time several things in turn, so that a change of the machine's load meets all of them.

    They begin rounds in turn, and the others follow in another order every time: what runs before leaves its mark on
    caches and sleeping threads.

    Args:
        timers: each is called once a round, after two rounds of warm-up.
        seconds: about how long to measure in all; at least three rounds are run, one if each takes four times as long.
        rounds: how many rounds to run instead.
        most: at most so many rounds.

    Returns:
        Seconds of each round, a list for each timer.
    """
    times: list[list[float]] = [[] for _ in timers]
    orders = random.Random(0)

    def run_all(turn: int) -> list[float]:
        taken = [0.0] * len(timers)
        first = turn % len(timers)
        others = [index for index in range(len(timers)) if index != first]
        orders.shuffle(others)
        for index in (first, *others):
            taken[index] = timers[index]()
        return taken

    estimate = sum(run_all(0))
    if rounds is not None or estimate < 4 * seconds:
        estimate = sum(run_all(1))
    if rounds is None:
        rounds = max(3 if estimate < 4 * seconds else 1, min(most, int(seconds / max(estimate, 1e-9))))
    for turn in range(rounds):
        for own, taken in zip(times, run_all(turn), strict=True):
            own.append(taken)
    return times


def clocked(call: Callable[[], object], device: torch.device) -> Timer:
    """Return what times a call: by CUDA's events after the caches were emptied, or by the clock on a CPU."""

    def on_cpu() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def on_gpu() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flushed(device).zero_()
        first.record()
        call()
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3

    return on_cpu if device.type == "cpu" else on_gpu


@cache
def _flushed(device: torch.device) -> Tensor:
    return torch.empty(_FLUSHED, dtype=torch.uint8, device=device)


def ratio_of(times: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Return how many times longer something took than ours, from times of the same rounds."""
    ratios = [other / own for other, own in zip(times, ours, strict=True)]
    bounds = interval(ratios) if len(ratios) >= 8 else (min(ratios), max(ratios))
    return Ratio(statistics.median(ratios), *bounds)


def interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval that holds the true median with this confidence: order statistics, whatever the distribution.

    Raises:
        ValueError: there are too few ratios for any.
    """
    ordered, count = sorted(ratios), len(ratios)
    tail, place = 0.0, 0
    while tail + 2 * math.comb(count, place) / 2**count <= 1 - confidence:
        tail += 2 * math.comb(count, place) / 2**count
        place += 1
    if place == 0:
        raise ValueError(f"{count} rounds are too few for an interval of {confidence:.0%}; eight are enough for 99%")
    return ordered[place - 1], ordered[count - place]
