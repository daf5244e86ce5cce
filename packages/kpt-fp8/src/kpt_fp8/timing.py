"""Measured seconds of layers on the inputs that they have in a model: each shape once."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .sensitivity import Candidate
from .trials import call

#: Seconds of measuring a shape, for all granularities together.
_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one layer in one run of the model.

    Attributes:
        before, after: seconds of all its calls.
        gain: before / after.
        noise: standard error of `gain`.
        kernel: what served op `fp8.linear`.
    """

    before: float
    after: float
    gain: float
    noise: float
    kernel: str


def time_layers(model: nn.Module, candidates: Sequence[Candidate], batch: Any) -> dict[tuple[str, str], Timing]:
    """Time each layer and what it would become, in turn, on the inputs of one batch.

    Layers of equal shapes, dtypes and strides are timed once: what a product costs does not depend on its numbers.

    Args:
        model: in evaluation mode; it runs once.
        candidates: the layers; those of one name are versions of one layer.
        batch: what the model runs on.

    Returns:
        By name and granularity. Layers that the batch does not reach are not in it.
    """
    versions: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        versions.setdefault(candidate.name, []).append(candidate)
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in versions}
    known: dict[tuple[Any, ...], list[Timing]] = {}
    with ExitStack() as stack:
        for name, several in versions.items():
            hook = _Timed(several, calls[name], known)
            stack.callback(several[0].linear.register_forward_hook(hook, with_kwargs=True).remove)
        call(model, batch)
    return {
        (name, candidate.granularity): _sum([known[key][place] for key in calls[name]])
        for name, several in versions.items()
        for place, candidate in enumerate(several)
        if calls[name]
    }


class _Timed:
    """A hook that times while the input is there, so that none is kept."""

    def __init__(
        self,
        versions: Sequence[Candidate],
        calls: list[tuple[Any, ...]],
        known: dict[tuple[Any, ...], list[Timing]],
    ) -> None:
        self._versions, self._calls, self._known = versions, calls, known

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        x = args[0] if args else named["input"]
        linear = self._versions[0].linear
        key = (x.shape, x.stride(), x.dtype, x.device, linear.weight.shape, linear.weight.dtype, linear.bias is None)
        self._calls.append(key)
        if key not in self._known:
            self._known[key] = _measure(self._versions, x)


def _measure(versions: Sequence[Candidate], x: Tensor) -> list[Timing]:
    from kpt_core import record
    from kpt_optimize import gain_of, interleaved_times

    linear = versions[0].linear
    # The product itself, without the hooks that are on the layer now.
    functions: list[Callable[[], object]] = [partial(nn.functional.linear, x, linear.weight, linear.bias)]
    functions += [partial(each.layer, x) for each in versions]
    with torch.no_grad():
        before, *after = interleaved_times(functions, x.device, seconds=_SECONDS)
        found = []
        for each, seconds in zip(versions, after, strict=True):
            with record() as log:
                each.layer(x)
            gain, noise = gain_of(before, seconds)
            found.append(Timing(_median(before), _median(seconds), gain, noise, log[0].kernel or "reference"))
    return found


def _median(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def _sum(timings: Sequence[Timing]) -> Timing:
    before, after = sum(each.before for each in timings), sum(each.after for each in timings)
    return Timing(before, after, before / after, max(each.noise for each in timings), timings[0].kernel)
