"""A row of the benchmark: each result is compared with float64, then all are timed in turn, beside what is possible."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal

import torch
from devices import Call, Ceilings, Work, alive, captured, seconds
from timing import Ratio, clocked, interleaved, ratio_of
from torch import Tensor

import kpt_core
from kpt_cli.bench.machine import plain_pytorch

#: `kpt` is what is measured; peers are what a user would have without it; `plain` is KPT without a vendor's kernels, in
#: plain PyTorch, `own` KPT in another dtype, and `dense` a product of as many operations without routing.
Role = Literal["kpt", "plain", "peer", "own", "dense"]
#: How far a result may be from float64, over the greatest number there: four eps (`kpt_optimize.rounding` says
#: why), and in float32 more, for sums of thousands of products.
#: In float8_e4m3fn it is half a step below the greatest number, 16 of 448, and a little for a tie.
TOLERANCES = {
    torch.float32: 1e-5,
    torch.float8_e4m3fn: 0.04,
    **{t: 4 * torch.finfo(t).eps for t in (torch.bfloat16, torch.float16)},
}
#: A contestant of which a timing takes more seconds than this, and several times those of the fastest, has only one.
_LONG, _SEVERAL = 0.5, 4


class GateError(Exception):
    """There are no figures, because a result of KPT is not right."""


class LeftOutError(Exception):
    """A contestant can't take part here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An implementation, with what it is called on.

    Attributes:
        name: in tables.
        role: see `Role`.
        dtype: of its result, or of the coarsest of its numbers.
        calls: timed one after the other, each on other inputs or weights.
        check: gives the tensors that are compared.
        exact: what these must be, in float64.
        capturable: whether a CUDA graph may hold it: it never waits for the device.
    """

    name: str
    role: Role
    dtype: torch.dtype
    calls: Sequence[Call]
    check: Call
    exact: Sequence[Tensor]
    capturable: bool = True

    def in_plain_pytorch(self) -> "Contestant":
        """Return the same without the kernels of a vendor's backend."""
        calls = [partial(_plain, call) for call in self.calls]
        return replace(self, name="plain", role="plain", calls=calls, check=partial(_plain, self.check))


def _plain(call: Call) -> Any:
    # Autograd's own threads for accelerators would not see the choice of kernels.
    with torch.autograd.set_multithreading_enabled(False), plain_pytorch():
        return call()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What a row is made of.

    Attributes:
        group: `decode`, `product`, `prefill`, `graph`, `step`, `gating` or `sorting`.
        name: of the row within its group.
        sizes: what distinguishes it, for JSON; `tokens` among them if there are any.
        dtype: as tables show it.
        work: what no contestant can avoid.
        contestants: KPT first.
        yardstick: a contestant whose accuracy KPT must reach.
        absent: peers that can't run here, and why.
        margins: how many times the mean and the largest error of `yardstick` KPT may have.
        training: gradients are computed.
        in_a_row: calls that a timing is of. In a model the next layer's call follows, not another contestant's, whose
            weights have driven code and data of the next one out of all caches.
        graph: calls are replays of a CUDA graph on a GPU.
        parameters: what a step keeps anyway.
        least_saved: bytes that any backward by the chain rule needs.
        wanted: of figures on an H200: at least, or at most where it is what is saved.
    """

    group: str
    name: str
    sizes: Mapping[str, int]
    dtype: str
    work: Work
    contestants: Sequence[Contestant]
    yardstick: str
    absent: Mapping[str, str] = field(default_factory=dict)
    margins: tuple[float, float] = (1.1, 2.0)
    training: bool = False
    in_a_row: int = 1
    graph: bool = False
    parameters: Sequence[Tensor] = ()
    least_saved: int = 0
    wanted: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return what is measured, as in `decode 1 token`."""
        return f"{self.group} {self.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """What one contestant did.

    Attributes:
        implementation: its name.
        role: its role.
        seconds: median of a call.
        rounds: how often it was timed; once, by one call, if that took long and several times as long as the fastest.
        gain: how many times longer it takes than KPT.
        error: largest, over the greatest number of the exact result.
        saved: bytes that autograd keeps in a step, over the least.
    """

    implementation: str
    role: Role
    seconds: float
    rounds: int
    gain: Ratio
    error: float
    saved: float | None = None

    def __str__(self) -> str:
        return f"{self.implementation} {self.gain}{'' if self.rounds > 1 else '*'}"


@dataclass(frozen=True, slots=True)
class Row:
    """All results of a contest.

    Attributes:
        contest: what was measured, without the contestants.
        results: of each contestant, KPT first.
        absent: peers that did not run, and why.
        kernels: what served KPT's ops, as in `moe.top_k_gating: reference`, in the order of the calls.
        backend: of the first of them; `reference` if there was none.
        bound_by: what sets the floor.
        share: of the floor in KPT's time, at the rate that the probe reached in turn with KPT.
        captured: who ran as a CUDA graph.
    """

    contest: Contest
    results: tuple[Result, ...]
    absent: Mapping[str, str]
    kernels: tuple[str, ...]
    backend: str
    bound_by: str
    share: Ratio
    captured: tuple[str, ...]

    @property
    def best_peer(self) -> Result | None:
        """Return the fastest peer."""
        return min((r for r in self.results if r.role == "peer"), key=lambda r: r.seconds, default=None)

    @property
    def figures(self) -> dict[str, float]:
        """Return KPT's figures by the names that `Contest.wanted` has."""
        kpt, contest = self.results[0], self.contest
        found = {
            "TFLOP/s": contest.work.flops / kpt.seconds / 1e12,
            "tokens/s": contest.sizes.get("tokens", 0) / kpt.seconds,
            "floor": self.share.value,
            **{f"over {result.implementation}": result.gain.value for result in self.results[1:]},
        }
        return found if kpt.saved is None else found | {"saved": kpt.saved}

    @property
    def targets(self) -> list[tuple[str, float, float, bool]]:
        """Return figure, what is wanted, what is there, and whether that suffices."""
        there = self.figures
        pairs = [(name, wanted, there[name]) for name, wanted in self.contest.wanted.items() if name in there]
        return [(name, wanted, got, got <= wanted if name == "saved" else got >= wanted) for name, wanted, got in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        contest, best = self.contest, self.best_peer
        return {
            "group": contest.group,
            "name": contest.name,
            **contest.sizes,
            "dtype": contest.dtype,
            "kernels": list(self.kernels),
            "backend": self.backend,
            "flops": contest.work.flops,
            "bytes": contest.work.bytes,
            "calls_in_a_row": contest.in_a_row,
            "bound_by": self.bound_by,
            "share_of_floor": asdict(self.share),
            "best_peer": best and best.implementation,
            "gain": best and best.gain.value,
            "figures": self.figures,
            "targets": self.targets,
            "captured": list(self.captured),
            "results": [asdict(result) for result in self.results],
            "absent": dict(self.absent),
        }


@dataclass(frozen=True, slots=True)
class _Checked:
    """A contestant whose results are right: mean and largest error, its calls, seconds of one, bytes saved."""

    contestant: Contestant
    mean: float
    largest: float
    calls: Sequence[Call]
    seconds: float
    saved: float | None

    @property
    def captured(self) -> bool:
        """Return whether calls are replays of CUDA graphs."""
        return self.calls is not self.contestant.calls


def measure(contest: Contest, ceilings: Ceilings, duration: float, device: torch.device) -> Row:
    """Check every contestant, then time them in turn, and KPT in turn with what sets its floor.

    A peer that raises or is wrong is absent, with the reason; so is plain PyTorch where KPT runs in it anyway.

    Args:
        contest: what is measured.
        ceilings: of the device.
        duration: about how many seconds the timing takes.
        device: where it runs.

    Raises:
        GateError: a result of KPT is not right.
    """
    with (
        torch.inference_mode()
        if device.type == "cpu" and not contest.training
        else torch.set_grad_enabled(contest.training)
    ):
        kernels = _kernels(contest.contestants[0])
        checked, absent = _check(contest, device, alone=all(b in ("torch", "reference") for _, b, _ in kernels))
        repeats = contest.in_a_row
        fastest = min(check.seconds for check in checked)
        once = [c for c in checked[1:] if c.seconds > max(_LONG / repeats, _SEVERAL * fastest)]
        timed = [check for check in checked if check not in once]
        # Each begins at another call than the one before it, whose weights may still be in a cache.
        timers = [clocked(_in_turn(c.calls, start * repeats, repeats), device) for start, c in enumerate(timed)]
        times = interleaved(timers, duration)
        # Not in the same rounds: whoever came after it would always find the caches full of what it read.
        probe, share = ceilings.floor(contest.work)
        own, floors = interleaved([timers[0], clocked(probe.call, device)], duration / 4)
    taken = {check.contestant.name: own for check, own in zip(timed, times, strict=True)}
    results = []
    for check in checked:
        name = check.contestant.name
        of_one = [each / repeats for each in taken[name]] if name in taken else [check.seconds]
        ours = [each / repeats for each in times[0]]
        gain = ratio_of(of_one, ours if name in taken else [statistics.median(ours)])
        median = statistics.median(of_one)
        results.append(Result(name, check.contestant.role, median, len(of_one), gain, check.largest, check.saved))
    return Row(
        replace(contest, contestants=(), parameters=()),  # which hold the weights
        tuple(results),
        absent,
        tuple(dict.fromkeys(f"{op}: {kernel}" for op, _, kernel in kernels)),
        kernels[0][1] if kernels else "reference",
        probe.name,
        ratio_of([each * share * repeats for each in floors], own),
        tuple(check.contestant.name for check in checked if check.captured),
    )


def _kernels(kpt: Contestant) -> list[tuple[str, str, str]]:
    """Return op, backend and kernel of every call that KPT dispatched."""
    with kpt_core.record() as log:
        kpt.calls[0]()
    return [(selection.op, selection.backend, selection.kernel) for selection in log]


def _check(contest: Contest, device: torch.device, *, alone: bool) -> tuple[list[_Checked], dict[str, str]]:
    """Return the contestants that are right, and those that can't run or are not, with the reason."""
    checked: dict[str, _Checked] = {}
    absent = dict(contest.absent)
    for contestant in contest.contestants:
        if contestant.role == "plain" and alone:
            absent[contestant.name] = "no vendor's kernel serves this here: KPT runs in plain PyTorch itself"
            continue
        try:
            checked[contestant.name] = _try(contest, contestant, device)
        except Exception as failure:
            if contestant.role in ("kpt", "own") or not alive(device):
                raise
            reason = (str(failure).splitlines() or [""])[0]
            told = isinstance(failure, GateError | LeftOutError)
            absent[contestant.name] = reason if told else f"{type(failure).__name__}: {reason}"
    kpt, yardstick = checked[contest.contestants[0].name], checked.get(contest.yardstick)
    if yardstick is not None:
        most_mean, most = contest.margins[0] * yardstick.mean, contest.margins[1] * yardstick.largest
        floor = torch.finfo(torch.float32).eps
        if not (kpt.mean <= most_mean + floor and kpt.largest <= most + floor):
            raise GateError(
                f"{_refused(contest)}: KPT's error against float64 is {kpt.mean:.2e} on average and {kpt.largest:.2e} "
                f"at most, that of {contest.yardstick} {yardstick.mean:.2e} and {yardstick.largest:.2e}"
            )
    return list(checked.values()), absent


def _try(contest: Contest, contestant: Contestant, device: torch.device) -> _Checked:
    got = contestant.check()
    errors = [_error(result, exact) for result, exact in zip(got, contestant.exact, strict=True)]
    # A NaN is the largest of all.
    mean, largest = (max((e[at] for e in errors), key=lambda e: math.inf if math.isnan(e) else e) for at in (0, 1))
    del got
    if not largest <= TOLERANCES[contestant.dtype]:
        raise GateError(
            f"{_refused(contest)}: {contestant.name} is off by {largest:.2e} of the greatest number of the exact "
            f"result, more than {TOLERANCES[contestant.dtype]:.1e}"
        )
    calls = contestant.calls
    saved = _saved(contest, calls[0]) if contest.least_saved and contestant.role != "dense" else None
    if contest.graph and device.type == "cuda" and contestant.capturable:
        try:
            calls = captured(calls)
        except RuntimeError:
            if contestant.role == "kpt" or not alive(device):
                raise
    # Not the check: it may be smaller, and some bring their weights into another order when they are first called.
    return _Checked(contestant, mean, largest, calls, seconds(calls[0], device), saved)


def _error(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return mean and largest error over the greatest number of the exact result; NaN where either has one."""
    if result.shape != exact.shape:
        raise GateError(f"no figures: a result is of shape {list(result.shape)}, not {list(exact.shape)}")
    difference = (result.detach().double() - exact).abs_() / exact.abs().max().clamp(min=1e-300)
    return difference.mean().item(), difference.max().item()


def _saved(contest: Contest, step: Call) -> float:
    """Return the bytes of the storages that autograd keeps for backward, parameters left out, over the least."""
    own = {parameter.untyped_storage().data_ptr() for parameter in contest.parameters}
    sizes: dict[int, int] = {}
    kept = []  # an address says which storage it is only as long as the storage lives

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(sizes.values()) / contest.least_saved


def _refused(contest: Contest) -> str:
    return f"no figures for {contest.title} in {contest.dtype}"


def _in_turn(calls: Sequence[Call], start: int, in_a_row: int) -> Call:
    turns = islice(cycle(calls), start % len(calls), None)

    def run() -> None:
        for call in islice(turns, in_a_row):
            call()

    return run
