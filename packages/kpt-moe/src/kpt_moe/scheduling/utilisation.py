"""Watching the load of experts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError
from kpt_moe._checks import require_size
from kpt_moe._counting import RouterCounts
from kpt_moe.router_losses import outer_routers
from kpt_moe.routers import Router
from kpt_moe.routing import Routing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class RouterUtilisation:
    """What experts of a router were asked for.

    Attributes:
        asked: choices of each expert, served or refused.
        dead: experts that were asked for too seldom, though they may be chosen.
        imbalance: choices of the busiest expert, as a multiple of the average of those that may be chosen; 0 without
            any choices.
    """

    asked: tuple[int, ...]
    dead: tuple[int, ...]
    imbalance: float


@dataclass(frozen=True, slots=True)
class UtilisationReport:
    """What a `UtilisationMonitor` saw since its last report.

    Attributes:
        step: steps of the monitor.
        routers: by path.
        max_imbalance: what counts as unbalanced.
    """

    step: int
    routers: dict[str, RouterUtilisation]
    max_imbalance: float

    @property
    def dead(self) -> dict[str, tuple[int, ...]]:
        """Dead experts by router, of routers that have any."""
        return {path: router.dead for path, router in self.routers.items() if router.dead}

    @property
    def unbalanced(self) -> tuple[str, ...]:
        """Routers whose imbalance is above `max_imbalance`."""
        return tuple(path for path, router in self.routers.items() if router.imbalance > self.max_imbalance)


class UtilisationMonitor(RouterCounts):
    """Look at the load of experts every few steps, and call back where something is wrong.

    Forward hooks count choices in training, on the device; the host waits for it at reports alone. What activation
    checkpointing repeats is not counted. What `torch.compile` has compiled so far is compiled again.

    Args:
        model: its routers are found when this is made.
        callback: called with a report that has dead experts or unbalanced routers.
        every: steps between reports.
        dead_below: an expert is dead if it is asked for at most this many times the average; one that `ExpertWarmup`
            has not opened when the report is made is not.
        max_imbalance: a router is unbalanced if its busiest expert is asked for more than this many times the average.
        group: ranks to sum over; every one of them has to call `step()`. None is this rank alone.

    Raises:
        InputError: the model has no router, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        callback: Callable[[UtilisationReport], object] | None = None,
        *,
        every: int = 100,
        dead_below: float = 0.01,
        max_imbalance: float = math.inf,
        group: "ProcessGroup | None" = None,
    ) -> None:
        require_size("UtilisationMonitor", "every", every)
        if not 0 <= dead_below < 1 or not max_imbalance >= 1:
            raise InputError(
                "UtilisationMonitor: dead_below must be at least 0 and below 1, max_imbalance at least 1; "
                f"got {dead_below} and {max_imbalance}"
            )
        self.callback, self.every, self.group = callback, every, group
        self.dead_below, self.max_imbalance = dead_below, max_imbalance
        self.steps_done = 0
        self._routers = outer_routers(model)
        super().__init__(self._routers, lambda router: router.num_experts + 1, _asked_and_calls, training_only=True)

    def step(self) -> UtilisationReport | None:
        """Go on by one step; the report if one is due.

        Raises:
            InputError: a report is due and a router has not run in training since the last one, on any rank.
        """
        self.steps_done += 1
        if self.steps_done % self.every:
            return None
        report = self._report()
        if self.callback is not None and (report.dead or report.unbalanced):
            self.callback(report)
        return report

    def close(self) -> None:
        """Count no more. Doing it twice does no harm."""
        self.detach()

    def _report(self) -> UtilisationReport:
        if self.group is not None:
            self._sum_over_ranks([self.group])
        counts = {
            path: part.tolist() for path, part in zip(self._routers, self._split(self._flat().cpu()), strict=True)
        }
        self.reset()
        # Only now, so that ranks agree.
        missing = [path for path, (*_, calls) in counts.items() if not calls]
        if missing:
            raise InputError(
                f"UtilisationMonitor: routers {missing} did not run in training since the last report: let it watch "
                "the part of the model that runs"
            )
        routers = {path: self._utilisation(self._routers[path], asked) for path, (*asked, _) in counts.items()}
        return UtilisationReport(self.steps_done, routers, self.max_imbalance)

    def _utilisation(self, router: Router, asked: Sequence[int]) -> RouterUtilisation:
        closed = [False] * len(asked) if router.unavailable is None else router.unavailable.tolist()
        average = sum(asked) / (len(asked) - sum(closed))
        dead = tuple(e for e, count in enumerate(asked) if count <= self.dead_below * average and not closed[e])
        return RouterUtilisation(tuple(asked), dead if average else (), max(asked) / average if average else 0.0)


def _asked_and_calls(routing: Routing) -> Tensor:
    return F.pad(routing.asked_per_expert(), (0, 1), value=1)
