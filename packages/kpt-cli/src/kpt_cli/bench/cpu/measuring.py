"""Running a contest: every result is checked against float64, then all are timed in turn."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

import kpt_core
from kpt_cli.bench.moe import GateError
from kpt_optimize import gain_of, interleaved_times

from .ceilings import Ceilings
from .contest import Call, Contest, Contestant, Result, Row

#: How far a result may be from float64, over the greatest number there: four eps (`kpt_optimize.rounding` says
#: why), and in float32 more, for sums of thousands of products.
TOLERANCES = {
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}
#: A contestant of which a timing takes more seconds than this, and several times those of the fastest, has only one.
_LONG = 0.5
_SEVERAL = 4


@dataclass(frozen=True, slots=True)
class _Checked:
    """A contestant whose results are right: its mean and largest error, and how long one call took."""

    contestant: Contestant
    mean: float
    largest: float
    seconds: float


def measure(contest: Contest, ceilings: Ceilings, seconds: float) -> Row:
    """Check every contestant, then time them in turn, and KPT in turn with what sets its floor.

    A peer that raises is absent, with what it said; so is plain PyTorch where KPT runs in it anyway.

    Args:
        contest: what is measured.
        ceilings: of the machine.
        seconds: about how long the timing takes; at least three rounds are run, one if each takes four times as long.

    Raises:
        GateError: a result is not right.
    """
    with torch.inference_mode(not contest.training):
        kernels = _kernels(contest.contestants[0])
        checked, absent = _check(contest, alone=all(backend in ("torch", "reference") for _, backend, _ in kernels))
        repeats = contest.in_a_row
        fastest = min(check.seconds for check in checked)
        once = [c for c in checked[1:] if c.seconds > max(_LONG / repeats, _SEVERAL * fastest)]
        timed = [check for check in checked if check not in once]
        # Each begins at another call than the one before it, whose weights may still be in a cache.
        calls = [_in_turn(check.contestant.calls, start * repeats, repeats) for start, check in enumerate(timed)]
        rounds = _rounds(repeats * sum(check.seconds for check in timed), seconds)
        times = _of_one_call(repeats, interleaved_times(calls, torch.device("cpu"), rounds=rounds))
        # Not in the same rounds: whoever came after it would always find the caches full of what it read.
        floor = ceilings.floor(contest.work)
        rounds = _rounds(repeats * checked[0].seconds + floor.bound_by.amount / floor.bound_by.rate, seconds / 4)
        taken, probe = interleaved_times([calls[0], floor.bound_by.call], torch.device("cpu"), rounds=rounds)
        (own,) = _of_one_call(repeats, [taken])
    floors = [taken * floor.share for taken in probe]
    results = {check.contestant.name: _result(check, took, times[0]) for check, took in zip(timed, times, strict=True)}
    results |= {check.contestant.name: _result(check, [check.seconds], times[0]) for check in once}
    return Row(
        replace(contest, contestants=()),  # which hold the weights
        tuple(results[check.contestant.name] for check in checked),
        absent,
        tuple(dict.fromkeys(f"{op}: {kernel}" for op, _, kernel in kernels)),
        kernels[0][1] if kernels else "reference",
        floor.bound_by.name,
        statistics.median(floors),
        *gain_of(floors, own),
    )


def _rounds(estimate: float, seconds: float) -> int:
    """How many rounds of so many seconds each: at least three, unless one takes four times as long as all should."""
    return max(3 if estimate < 4 * seconds else 1, min(200, int(seconds / max(estimate, 1e-9))))


def _kernels(kpt: Contestant) -> list[tuple[str, str, str]]:
    """Op, backend and kernel of every call that KPT dispatched."""
    with kpt_core.record() as log:
        kpt.calls[0]()
    return [(selection.op, selection.backend, selection.kernel) for selection in log]


def _check(contest: Contest, *, alone: bool) -> tuple[list[_Checked], dict[str, str]]:
    """The contestants that are right, and those that can't run, with what they said."""
    checked: dict[str, _Checked] = {}
    absent = dict(contest.absent)
    for contestant in contest.contestants:
        if contestant.role == "plain" and alone:
            absent[contestant.name] = "no vendor's kernel serves this here: KPT runs in plain PyTorch itself"
            continue
        try:
            checked[contestant.name] = _try(contest, contestant)
        except (RuntimeError, ImportError, ValueError) as failure:
            if contestant.role != "peer":
                raise
            absent[contestant.name] = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    kpt, yardstick = checked[contest.contestants[0].name], checked.get(contest.yardstick)
    if yardstick is not None:
        most_mean, most = (factor * error for factor, error in zip(contest.margins, _errors(yardstick), strict=True))
        floor = torch.finfo(torch.float32).eps
        if not (kpt.mean <= most_mean + floor and kpt.largest <= most + floor):
            raise GateError(
                f"{_title(contest)}: KPT's error against float64 is {kpt.mean:.2e} on average and {kpt.largest:.2e} at "
                f"most, that of {contest.yardstick} {yardstick.mean:.2e} and {yardstick.largest:.2e}"
            )
    return list(checked.values()), absent


def _try(contest: Contest, contestant: Contestant) -> _Checked:
    errors = []
    for trial in contestant.trials:
        got = trial.call()
        errors += [_error(result, exact) for result, exact in zip(got, trial.exact, strict=True)]
    mean, largest = (max(error[column] for error in errors) for column in (0, 1))
    if not largest <= TOLERANCES[contestant.dtype]:
        raise GateError(
            f"{_title(contest)}: {contestant.name} is off by {largest:.2e} of the greatest number of the exact result, "
            f"more than {TOLERANCES[contestant.dtype]:.1e}"
        )
    # Not the trial: it may be smaller, and some bring their weights into another order when they are first called.
    start = time.perf_counter()
    contestant.calls[0]()
    taken = time.perf_counter() - start
    return _Checked(contestant, mean, largest, taken)


def _error(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean and largest error over the greatest number of the exact result; NaN where either has one."""
    if result.shape != exact.shape:
        raise GateError(f"no figures: a result is of shape {list(result.shape)}, not {list(exact.shape)}")
    difference = (result.double() - exact).abs() / exact.abs().max()
    return difference.mean().item(), difference.max().item()


def _errors(checked: _Checked) -> tuple[float, float]:
    return checked.mean, checked.largest


def _title(contest: Contest) -> str:
    return f"no figures for {contest.group} {contest.name} in {contest.dtype}"


def _in_turn(calls: Sequence[Call], start: int, in_a_row: int) -> Call:
    turns = islice(cycle(calls), start % len(calls), None)

    def run() -> None:
        for call in islice(turns, in_a_row):
            call()

    return run


def _of_one_call(in_a_row: int, times: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[taken / in_a_row for taken in own] for own in times]


def _result(checked: _Checked, taken: Sequence[float], kpt: Sequence[float]) -> Result:
    contestant, median = checked.contestant, statistics.median(taken)
    if len(taken) == 1:
        gain, noise, low, high = median / statistics.median(kpt), None, median, median
    else:
        gain, noise = gain_of(taken, kpt)
        low, _, high = statistics.quantiles(taken, n=4)
    return Result(contestant.name, contestant.role, median, low, high, len(taken), gain, noise, checked.largest)
