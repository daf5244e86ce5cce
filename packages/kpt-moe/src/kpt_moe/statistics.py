"""What routers do: who is loaded, who is idle, what is dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from kpt_core import InputError

from ._counting import RouterCounts
from .routers import Router
from .routing import Routing


@dataclass(frozen=True, slots=True)
class RouterSummary:
    """What a router did since its counts were reset, in plain numbers.

    All but `load` tell what was asked of experts, before capacity: that is where a router's collapse shows.

    Attributes:
        tokens: tokens that counted, so without padding.
        load: choices that each expert served.
        asked: choices of tokens that counted, of each expert, served or refused.
        dropped: those that were refused for want of capacity.
        share: of each expert in all that was asked; zeros if nothing was.
        imbalance: greatest over mean of `asked`: 1 is perfect balance, the number of experts is collapse; 0 if nothing
            was asked.
        dropped_share: `dropped` in all that was asked; 0 if nothing was.
        entropy: of `share`, in nats: the logarithm of the number of experts is perfect balance.
        dead: experts that no token asked for.
    """

    tokens: int
    load: tuple[int, ...]
    asked: tuple[int, ...]
    dropped: int
    share: tuple[float, ...]
    imbalance: float
    dropped_share: float
    entropy: float
    dead: tuple[int, ...]


class RouterStatistics(RouterCounts):
    """Count what every router of a model decides, in training or not, and tell it when asked.

    Nothing is read on the host but by `snapshot`, so that training goes on as before. Forward passes that activation
    checkpointing repeats are not counted again. What `torch.compile` has compiled so far is compiled again.

    Args:
        model: its modules that are a `Router` are hooked; it may be one itself.

    Raises:
        InputError: there is none.

    Example:
        >>> with RouterStatistics(model) as statistics:
        ...     model(x)
        ...     statistics.snapshot()["router"].imbalance
    """

    def __init__(self, model: nn.Module) -> None:
        routers = {path: module for path, module in model.named_modules() if isinstance(module, Router)}
        if not routers:
            raise InputError(f"RouterStatistics: {type(model).__name__} has no kpt_moe.Router to count")
        super().__init__(routers, _size, _measure)

    def snapshot(self) -> dict[str, RouterSummary]:
        """The summary of each router by path; the only method that waits for the device."""
        return {
            path: _summary(counts.tolist())
            for path, counts in zip(self._counters, self._split(self._flat().cpu()), strict=True)
        }

    def all_reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """Sum the counts over ranks, in one all-reduce; nothing where torch.distributed is not initialised.

        Every rank then has the sum, so call `reset` before counting on.

        Args:
            group: ranks that route different tokens by the same layers; None is all of them.
        """
        self._sum_over_ranks([group])


def _size(router: Router) -> int:
    return 2 * router.num_experts + 2


def _measure(routing: Routing) -> Tensor:
    """Load and asked of each expert, dropped, tokens."""
    dropped = routing.dropped().reshape(1)
    if routing.mask is not None:
        tokens = routing.mask.sum().reshape(1)
    else:
        tokens = torch.full_like(dropped, routing.logits.shape[0])
    return torch.cat((routing.tokens_per_expert(), routing.asked_per_expert(), dropped, tokens))


def _summary(counts: Sequence[int]) -> RouterSummary:
    num_experts = len(counts) // 2 - 1
    load, asked = tuple(counts[:num_experts]), tuple(counts[num_experts:-2])
    dropped, tokens = counts[-2:]
    total = sum(asked)
    share = tuple(count / max(total, 1) for count in asked)
    return RouterSummary(
        tokens=tokens,
        load=load,
        asked=asked,
        dropped=dropped,
        share=share,
        imbalance=max(share) * num_experts,
        dropped_share=dropped / max(total, 1),
        entropy=-sum(part * math.log(part) for part in share if part),
        dead=tuple(expert for expert, count in enumerate(asked) if not count),
    )
