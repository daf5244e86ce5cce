"""What a call costs beside the reference: time, and the most memory that it has at once."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kpt_conformance.drawing import drawn_cases
from kpt_conformance.extent import over
from kpt_conformance.trial import Trial
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments, Case

#: As many times the reference's are told.
_TIMES = 4
#: Seconds and bytes above the reference's below which nothing is told: a call itself costs something, and so do tiles.
_LEAST_SECONDS, _LEAST_BYTES = 1e-3, 2**23
_RUNS = 5
#: The product of sizes of the cases that are measured is at most this: the reference takes one to ten milliseconds.
_WORK = (200_000, 2_000_000)
#: Where a dimension is twice as large, linear memory is, too: less than this many times as much.
_LINEAR = 3.0
#: Bytes of growth that don't count.
_LEAST_GROWTH = 2**20
#: How large a dimension is at first, in which memory should be linear.
_LENGTH = 512


class CostWarning(UserWarning):
    """A kernel is slow or large beside the reference; that a machine was busy can't be ruled out."""


def tell(message: str) -> None:
    """Warn, also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CostWarning)
        warnings.warn(message, CostWarning, stacklevel=2)


@over(first_case=True, references=False)
def cost(trial: Trial) -> None:
    """Time and memory of a call are told if they are more than four times the reference's; memory is linear if said.

    Native libraries' own memory is not seen on a CPU, but what they get from torch.
    """
    measurable = trial.subject.device.type in ("cpu", "cuda")
    if trial.subject.direct or not measurable:
        pytest.skip("nothing is measured in an interpreter, and of devices those of the CPU and CUDA")
    _require_linear(trial)
    reference = replace(
        trial, subject=replace(trial.subject, target=REFERENCE, backend=REFERENCE, kernel=None, children=())
    )
    for work in _WORK:
        arguments = _middle(trial, work)
        for trained in {False, trial.differentiable}:
            what = "a call with its backward" if trained else "a call without gradients"
            tried, beside = (
                partial((each if trained else each.forward_only()).run, arguments) for each in (trial, reference)
            )
            _compare(trial, what, tried, beside)


def _compare(trial: Trial, what: str, tried: Callable[[], Any], beside: Callable[[], Any]) -> None:
    """Tell of a call that is slow or large beside the reference's."""
    seconds, least = _fastest(trial, tried, beside)
    if _slow(seconds, least):
        tell(f"{trial}: {what} takes {seconds * 1e3:.1f} ms, the reference {least * 1e3:.1f} ms")
    size, smallest = (peak_bytes(trial.subject.device, run) for run in (tried, beside))
    if size > _TIMES * smallest and size - smallest > _LEAST_BYTES:
        tell(f"{trial}: {what} has {size / 2**20:.1f} MiB at once, the reference {smallest / 2**20:.1f} MiB")


def _middle(trial: Trial, work: int) -> Arguments:
    """Return arguments of the largest case that nobody has to wait for, of those that the subject takes."""
    small = [case for case in trial.table.cases if not (case.model or case.large)]
    drawn = [case for case in drawn_cases(trial.table) if case.once is None and _work(case) <= work]
    for case in (*sorted(drawn, key=_work, reverse=True)[:8], *small):
        arguments = trial.table.arguments(case, dtype=trial.dtype, device=trial.subject.device)
        if trial.refusal(arguments) is None:
            return arguments
    return trial.arguments()


def _work(case: Case) -> int:
    return math.prod(max(size, 1) for size in case.sizes.values() if type(size) is int)


def _slow(seconds: float, least: float) -> bool:
    return seconds > _TIMES * least and seconds - least > _LEAST_SECONDS


def _fastest(trial: Trial, tried: Callable[[], Any], beside: Callable[[], Any]) -> tuple[float, float]:
    """Return the least seconds of some runs of each, in turn: what disturbs one disturbs the other.

    They end where it is not slow: the rest would tell nothing.
    """
    cuda: Any = torch.cuda
    wait: Callable[[], Any] = cuda.synchronize if trial.subject.device.type == "cuda" else lambda: None

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - start

    for run in (tried, beside):  # the first one may prepare something
        run()
    ours = theirs = math.inf
    for _ in range(_RUNS):
        ours, theirs = min(ours, seconds(tried)), min(theirs, seconds(beside))
        if not _slow(ours, theirs):
            break
    return ours, theirs


def peak_bytes(device: torch.device, run: Callable[[], Any]) -> int:
    """Return the most memory that torch's allocator had given out at once during a run, above what it had before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = run()
    del made
    results: Any = profiled.profiler
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    most = now = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    return most


def _require_linear(trial: Trial) -> None:
    """Raise `AssertionError` if the op says that memory is linear in dimensions and the kernel's grows faster."""
    names = trial.table.linear_in
    if not names:
        return
    sizes = []
    for length in (_LENGTH, 2 * _LENGTH):
        case = replace(trial.case, sizes={**trial.case.sizes, **dict.fromkeys(names, length)})
        arguments = trial.table.arguments(case, dtype=trial.dtype, device=trial.subject.device)
        if trial.refusal(arguments) is not None:
            return
        trial.run(arguments)
        sizes.append(peak_bytes(trial.subject.device, partial(trial.run, arguments)))
    small, large = sizes
    told = " and ".join(names)
    assert large <= _LINEAR * small or large - small < _LEAST_GROWTH, (
        f"{small / 2**20:.1f} MiB at once for {told} of {_LENGTH}, {large / 2**20:.1f} MiB for twice as many; "
        f"memory must be linear in {told}"
    )
