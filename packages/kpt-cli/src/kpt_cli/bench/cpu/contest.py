"""A row of the benchmark: who takes part, on what, and what came of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kpt_cli.plain_pytorch import plain_pytorch

from .ceilings import Work

#: `kpt` is what is measured; peers are what a user would have without it; `plain` is KPT without a vendor's kernels, in
#: plain PyTorch, `own` KPT in another dtype, and `dense` a product of as many operations without routing.
Role = Literal["kpt", "plain", "peer", "own", "dense"]
Call = Callable[[], Any]
#: So many calls of a decode or a product are timed in a row, on other weights or experts each: in a model the next
#: layer's call follows, not another contestant's, whose weights have driven code and data of the next one out of all
#: caches.
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """A call whose result is known.

    Attributes:
        call: gives tensors.
        exact: what these must be, in float64.
    """

    call: Callable[[], Sequence[Tensor]]
    exact: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Contestant:
    """An implementation, with what it is called on.

    Attributes:
        name: in tables.
        role: see `Role`.
        dtype: of its result, or of the coarsest of its numbers.
        calls: timed one after the other, each on other inputs or weights.
        trials: checked before.
    """

    name: str
    role: Role
    dtype: torch.dtype
    calls: Sequence[Call]
    trials: Sequence[Trial]


@dataclass(frozen=True, slots=True)
class Contest:
    """What a row is made of.

    Attributes:
        group: `decode`, `product`, `prefill`, `step`, `gating` or `sorting`.
        name: of the row within its group.
        sizes: what distinguishes it, for JSON.
        dtype: as tables show it.
        work: what no contestant can avoid.
        rotation: bytes of the weights or inputs that the calls take turns over.
        contestants: KPT first.
        absent: peers that can't run here, and why.
        margins: how many times the mean and the largest error of `yardstick` KPT may have.
        yardstick: a contestant whose accuracy KPT must reach.
        training: gradients are computed.
        in_a_row: calls that a timing is of, see `LAYERS`.
    """

    group: str
    name: str
    sizes: Mapping[str, int]
    dtype: str
    work: Work
    rotation: int
    contestants: Sequence[Contestant]
    yardstick: str
    absent: Mapping[str, str] = field(default_factory=dict)
    margins: tuple[float, float] = (1.1, 2.0)
    training: bool = False
    in_a_row: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What one contestant did.

    Attributes:
        implementation: its name.
        role: its role.
        seconds: median of a call.
        low: first quartile of the seconds.
        high: third quartile.
        rounds: how often it was timed; once, by one call, if that took long and several times as long as the fastest.
        gain: KPT's speed over this one's, the median of the rounds' ratios.
        noise: standard error of `gain`; None after one round.
        error: largest, over the greatest number of the exact result.
    """

    implementation: str
    role: Role
    seconds: float
    low: float
    high: float
    rounds: int
    gain: float
    noise: float | None
    error: float


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
        floor: seconds, at the rate that this probe reached in turn with KPT.
        share: of the floor in KPT's time, the median of these rounds.
        share_noise: standard error of `share`.
    """

    contest: Contest
    results: tuple[Result, ...]
    absent: Mapping[str, str]
    kernels: tuple[str, ...]
    backend: str
    bound_by: str
    floor: float
    share: float
    share_noise: float

    @property
    def title(self) -> str:
        """What was measured, as in `decode 1 token`."""
        return f"{self.contest.group} {self.contest.name}"

    @property
    def best_peer(self) -> Result | None:
        """The fastest peer."""
        return min((r for r in self.results if r.role == "peer"), key=lambda r: r.seconds, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            "rotation_bytes": contest.rotation,
            "calls_in_a_row": contest.in_a_row,
            "bound_by": self.bound_by,
            "floor_seconds": self.floor,
            "share_of_floor": self.share,
            "share_noise": self.share_noise,
            "best_peer": best and best.implementation,
            "gain": best and best.gain,
            "results": [{name: getattr(result, name) for name in Result.__slots__} for result in self.results],
            "absent": dict(self.absent),
        }


def in_plain_pytorch(call: Call) -> Call:
    """The same call without the kernels of a vendor's backend."""

    def run() -> Any:
        with plain_pytorch():
            return call()

    return run
