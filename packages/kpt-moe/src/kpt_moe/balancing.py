"""Balance experts by a bias on the choice, without an auxiliary loss."""

from collections.abc import Sequence

import torch
from torch import distributed, nn

from kpt_core import InputError

from ._checks import require_number
from ._counting import RouterCounts
from .routers import Router


class BiasBalancer(RouterCounts):
    """Move each router's `correction_bias` against its load, once per optimizer step.

    An expert that was asked for more often than the average loses `rate`, one that was asked for less gains it
    (auxiliary-loss-free load balancing, arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437). Loads are summed over the
    micro-batches between two steps and over ranks; in training alone, as `RouterStatistics` counts. Nothing is read on
    the host. The biases are buffers of the routers, so that they are saved with the model: the balancer has no state of
    its own to save. An expert that `ExpertWarmup` has not opened yet, or `ExpertDropout` drops, keeps its bias, and
    counts in no average. Call `step()` before theirs: those say who takes part in the next step.

    Args:
        model: its routers with a `correction_bias` are balanced (`TopKRouter(..., correction_bias=True)`).
        rate: how far a bias moves in a step; may be assigned to, for a schedule.
        group: ranks that route different tokens by the same layers, the data-parallel ones; several groups are summed
            over one after the other; None is all ranks. With pipeline parallelism it must be given, since other ranks
            then have other layers.

    Raises:
        InputError: no router has a `correction_bias`, or the rate is not positive.

    Examples:
        >>> balancer = BiasBalancer(model)
        >>> for batch in batches:
        ...     loss(model(batch)).backward()
        ...     optimizer.step()
        ...     balancer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rate: float = 1e-3,
        group: distributed.ProcessGroup | Sequence[distributed.ProcessGroup] | None = None,
    ) -> None:
        require_number("BiasBalancer", "rate", rate, "a positive number")
        routers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, Router) and getattr(module, "correction_bias", None) is not None
        }
        if not routers:
            raise InputError(
                f"BiasBalancer: no router of {type(model).__name__} has a correction_bias: make them with "
                "correction_bias=True"
            )
        self.rate = rate
        self.groups = tuple(group) if isinstance(group, Sequence) else (group,)
        super().__init__(routers, training_only=True)

    def step(self) -> None:
        """Sum the loads over ranks, move the biases, and start to count anew; to be called after `optimizer.step()`.

        Every rank must call it, one that saw no tokens too. A router that saw none keeps its bias.
        """
        self._sum_over_ranks(self.groups)
        for path, router in self._routers.items():
            load = self._counters[path].total[router.num_experts : -2]  # what was asked for
            bias = router.get_buffer("correction_bias")
            # By 0 or 1: an expert that no token may choose would rise until it opens, and then take every token. Of
            # dropped ones the zeros would pull the average so far down that all the others lost alike.
            counts = torch.ones_like(load)
            for closed in (router.unavailable, router.dropped):
                counts = counts if closed is None else counts * (~closed).to(load)
            load = load * counts
            # The sign of mean - load, in whole numbers: no rounding on which ranks could differ.
            direction = (load.sum() - load * counts.sum()).sign() * counts
            bias.add_(direction.to(bias), alpha=self.rate)
        self.reset()
