"""Watching the load of experts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kpt_core import InputError
from kpt_moe._checks import require_size
from kpt_moe.router_losses import in_recomputation, outer_routers
from kpt_moe.routing import Routing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class RouterUtilisation:
    """What experts of a router were asked for.

    Attributes:
        asked: choices of each expert, served or refused.
        dead: experts that were asked for too seldom.
        imbalance: choices of the busiest expert, as a multiple of the average; 0 without any choices.
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


class UtilisationMonitor:
    """Look at the load of experts every few steps, and call back where something is wrong.

    Forward hooks count choices in training, on the device; the host waits for it at reports alone. What activation
    checkpointing repeats is not counted. Models under `torch.compile` need the monitor before their first call.

    Args:
        model: its routers are found when this is made.
        callback: called with a report that has dead experts or unbalanced routers.
        every: steps between reports.
        dead_below: an expert is dead if it is asked for at most this many times the average.
        max_imbalance: a router is unbalanced if its busiest expert is asked for more than this many times the average.
        group: ranks to sum over; every one of them has to call `step()`.

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
        self._asked: dict[str, Tensor] = {}
        self._handles = [r.register_forward_hook(partial(self._count, path)) for path, r in self._routers.items()]

    def step(self) -> UtilisationReport | None:
        """Go on by one step; the report if one is due.

        Raises:
            InputError: a report is due and a router has not run in training since the last one.
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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count(self, path: str, router: nn.Module, args: Any, routing: Routing) -> None:
        if router.training and not in_recomputation():
            asked = routing.asked_per_expert()
            self._asked[path] = self._asked[path] + asked if path in self._asked else asked

    def _report(self) -> UtilisationReport:
        missing = [path for path in self._routers if path not in self._asked]
        if missing:
            raise InputError(
                f"UtilisationMonitor: routers {missing} did not run in training since the last report: of a compiled "
                "model, make the monitor before its first call; else let it watch the part that runs"
            )
        asked, self._asked = [self._asked[path] for path in self._routers], {}
        counts = torch.cat([count.to(asked[0].device) for count in asked])
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        parts = counts.cpu().split([count.numel() for count in asked])
        routers = {path: self._utilisation(part.tolist()) for path, part in zip(self._routers, parts, strict=True)}
        return UtilisationReport(self.steps_done, routers, self.max_imbalance)

    def _utilisation(self, asked: Sequence[int]) -> RouterUtilisation:
        average = sum(asked) / len(asked)
        dead = tuple(expert for expert, count in enumerate(asked) if count <= self.dead_below * average)
        return RouterUtilisation(tuple(asked), dead if average else (), max(asked) / average if average else 0.0)
