"""What routers do: who is loaded, who is idle, what is dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, distributed, nn

from ._counting import RouterCounts, deciding_modules


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
        imbalance: greatest over mean of `asked`, of experts that may be chosen: 1 is perfect balance, their number is
            collapse; 0 if nothing was asked.
        dropped_share: `dropped` in all that was asked; 0 if nothing was.
        entropy: of `share`, in nats: the logarithm of the number of experts is perfect balance.
        dead: experts that were asked for too seldom, though they may be chosen.
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
        model: its modules that are a `Router` are hooked, and the experts modules of Hugging Face models, whose
            padding counts as tokens; it may be one itself.
        training_only: leave out what routers decide outside of training.

    Raises:
        InputError: there is no such module.

    Examples:
        >>> with RouterStatistics(model) as statistics:
        ...     model(x)
        ...     statistics.snapshot()["router"].imbalance
    """

    def __init__(self, model: nn.Module, *, training_only: bool = False) -> None:
        super().__init__(deciding_modules(model, "RouterStatistics"), training_only=training_only)

    def snapshot(self, *, dead_below: float = 0.0) -> dict[str, RouterSummary]:
        """The summary of each router by path; the only method that waits for the device.

        Args:
            dead_below: an expert is dead if it is asked for at most this many times the average; one that
                `ExpertWarmup` has not opened when this is called is not.
        """
        return {
            path: _summary(counts.tolist(), getattr(router, "unavailable", None), dead_below)
            for (path, router), counts in zip(self._routers.items(), self._split(self._flat().cpu()), strict=True)
        }

    def all_reduce(self, group: distributed.ProcessGroup | None = None) -> None:
        """Sum the counts over ranks, in one all-reduce; nothing where torch.distributed is not initialised.

        Every rank then has the sum, so call `reset` before counting on.

        Args:
            group: ranks that route different tokens by the same layers; None is all of them.
        """
        self._sum_over_ranks([group])


def _summary(counts: Sequence[int], closed: Tensor | None, dead_below: float) -> RouterSummary:
    num_experts = len(counts) // 2 - 1
    load, asked = tuple(counts[:num_experts]), tuple(counts[num_experts:-2])
    dropped, tokens = counts[-2:]
    may = [True] * num_experts if closed is None else (~closed).tolist()
    total, least = sum(asked), dead_below * sum(asked) / max(sum(may), 1)
    share = tuple(count / max(total, 1) for count in asked)
    return RouterSummary(
        tokens=tokens,
        load=load,
        asked=asked,
        dropped=dropped,
        share=share,
        imbalance=max(share) * sum(may),
        dropped_share=dropped / max(total, 1),
        entropy=-sum(part * math.log(part) for part in share if part),
        dead=tuple(expert for expert, count in enumerate(asked) if count <= least and may[expert]),
    )
