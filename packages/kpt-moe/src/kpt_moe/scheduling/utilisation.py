"""Watching the load of experts, and giving those that no token asks for another start."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kpt_core import InputError
from kpt_moe._checks import require_number, require_size
from kpt_moe.expert_networks import FeedForwardExpert
from kpt_moe.routers import LinearRouter, Router
from kpt_moe.statistics import RouterStatistics, RouterSummary


class UtilisationMonitor(RouterStatistics):
    """`RouterStatistics` of training, read every few steps, which calls back where experts are dead.

    A report has the summary of each router that ran since the last one, by its path.

    Args:
        callback: called with a report that has dead experts.
        every: steps between reports, each of which waits for the device and begins to count anew.
        dead_below: an expert is dead if it is asked for at most this many times the average, see `snapshot`.
        group: ranks to sum over; every one of them has to call `step()`. None is this rank alone.

    Raises:
        InputError: the model has no router, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        callback: Callable[[dict[str, RouterSummary]], object] | None = None,
        *,
        every: int = 100,
        dead_below: float = 0.01,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_size("UtilisationMonitor", "every", every)
        require_number("UtilisationMonitor", "dead_below", dead_below, "at least 0 and below 1")
        self.callback, self.every, self.dead_below, self.group = callback, every, dead_below, group
        self.steps_done = 0
        super().__init__(model, training_only=True)

    def step(self) -> dict[str, RouterSummary] | None:
        """Go on by one step; the report if one is due.

        Raises:
            InputError: a report is due and no router has run in training since the last one, on any rank.
        """
        self.steps_done += 1
        if self.steps_done % self.every:
            return None
        if self.group is not None:
            self.all_reduce(self.group)
        report = {path: each for path, each in self.snapshot(dead_below=self.dead_below).items() if any(each.asked)}
        self.reset()
        if not report:
            raise InputError(
                "UtilisationMonitor: no router ran in training since the last report: let it watch the part of the "
                "model that runs"
            )
        if self.callback is not None and any(router.dead for router in report.values()):
            self.callback(report)
        return report


@torch.no_grad()
def revive_dead_experts(
    model: nn.Module,
    report: Mapping[str, RouterSummary],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    noise: float = 0.01,
    seed: int = 0,
) -> list[tuple[str, int, int]]:
    """Make each dead expert a copy of a busy one, plus noise.

    With one expert per token the two share the busy one's tokens. With more, most of those tokens choose both until
    training parts them: their other choices are displaced, and the layer's output jumps. Revive early then, or little.

    As sparse upcycling makes experts of one dense network (arXiv:2212.05055): weights and biases of the expert, its row
    of the router's weight, its bias and correction bias become those of the busiest expert, of the second busiest for
    the second dead one, and so on. All but what is one number per expert then gets normal noise, so that the copy and
    its model part ways. State of the optimizer that belongs to what was replaced is set to zero; its count of steps is
    common to all experts and stays.

    Args:
        model: whose routers the report is of; layers have a `LinearRouter` as `router` and a `FeedForwardExpert` as
            `experts`, with parameters that are whole on this rank. Each rank that holds them has to call.
        report: of a `UtilisationMonitor` of the same model.
        optimizer: of the parameters.
        noise: deviation, as a multiple of that of the weights that are copied.
        seed: of the noise, which is the same on every rank.

    Returns:
        Path of the router, the expert that was dead, and the one that it was copied from.

    Raises:
        InputError: `noise` is negative, the report is of another model, or a layer is of another kind.
    """
    require_number("revive_dead_experts", "noise", noise, "at least 0")
    require_size("revive_dead_experts", "seed", seed, least=0)
    generator = torch.Generator().manual_seed(seed)
    layers = {path: _stacked(model, path, len(seen.asked)) for path, seen in report.items() if seen.dead}
    revived = []
    for path, (router, parameters) in layers.items():
        asked, dead = report[path].asked, report[path].dead
        # What is not open yet is not dead, and has learned nothing that could be copied.
        donors = sorted((e for e in range(len(asked)) if asked[e] and e not in dead), key=lambda e: -asked[e])
        for place, expert in enumerate(dead):
            donor = donors[place % len(donors)]
            for parameter in parameters:
                value = parameter[donor]
                if parameter.dim() > 1 and noise:
                    spread = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
                    value = value + spread * (noise * value.std(correction=0))
                parameter[expert] = value
                _forget(optimizer, parameter, expert)
            correction = getattr(router, "correction_bias", None)
            if correction is not None:
                correction[expert] = correction[donor]
            revived.append((path, expert, donor))
    return revived


def _stacked(model: nn.Module, path: str, num_experts: int) -> tuple[Router, list[nn.Parameter]]:
    """The router at a path, and the parameters of it and of its experts, whose first size is that of experts."""
    modules = dict(model.named_modules())
    router = modules.get(path)
    layer = next((m for m in modules.values() if router is not None and getattr(m, "router", None) is router), None)
    if layer is None:
        raise InputError(
            f"revive_dead_experts: the model has no layer with a router at {path!r}: give the model that was monitored"
        )
    experts = getattr(layer, "experts", None)
    if not isinstance(router, LinearRouter) or not isinstance(experts, FeedForwardExpert):
        raise InputError(
            f"revive_dead_experts: knows LinearRouter with FeedForwardExpert; {path!r} is {type(router).__name__} "
            f"with {type(experts).__name__}"
        )
    parameters = [router.weight, *experts.parameters()] + ([] if router.bias is None else [router.bias])
    if any(parameter.shape[0] != num_experts or hasattr(parameter, "full_tensor") for parameter in parameters):
        raise InputError(
            f"revive_dead_experts: a parameter of {path!r} is sharded, or not of {num_experts} experts: revive where "
            "parameters are whole"
        )
    return router, parameters


def _forget(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter, expert: int) -> None:
    """Set what an optimizer keeps of an expert's slice to zero; factored state has the experts first too."""
    for value in ({} if optimizer is None else optimizer.state.get(parameter, {})).values():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == parameter.shape[0]:
            value[expert] = 0
