"""What every loss of routers needs: sums over the tokens that count, and their weight among ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from kpt_core import InputError, UnknownNameError
from kpt_moe.routing import Routing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How logits become a token's probabilities: a softmax; or sigmoids divided by their sum (DeepSeek-V3).
Score = Literal["softmax", "sigmoid"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")

Routings = Routing | Sequence[Routing]


def routing_from_logits(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Routing:
    """The routing of a model that gives logits alone: each token's `top_k` highest, weighted by their softmax.

    Args:
        logits: `[..., num_experts]`; leading sizes are flattened.
        top_k: experts per token.
        mask: `[...]`, of integers or bool, zero for padding.

    Raises:
        InputError: `top_k` is not between 1 and `num_experts`, or the mask is of another shape.
    """
    if logits.dim() < 1 or not 1 <= top_k <= logits.shape[-1]:
        raise InputError(
            f"routing_from_logits: top_k must be between 1 and the last size of the logits "
            f"{list(logits.shape)}; got {top_k}"
        )
    if mask is not None and mask.numel() != logits.numel() // logits.shape[-1]:
        raise InputError(
            f"routing_from_logits: mask must be {list(logits.shape[:-1])}, as the logits without their last size; "
            f"got {list(mask.shape)}"
        )
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = logits.softmax(-1).topk(top_k, dim=-1)
    return Routing(best.indices, best.values, logits, None if mask is None else mask.reshape(-1).bool())


def listed(routings: Routings) -> Sequence[Routing]:
    """One routing or several as a list of at least one, all of one number of experts."""
    given = [routings] if isinstance(routings, Routing) else list(routings)
    experts = sorted({routing.num_experts for routing in given})
    if len(experts) != 1:
        raise InputError(
            f"a loss needs routings of one number of experts, at least one; got {len(given)} of {experts} experts: "
            "take the loss of each kind of layer by itself"
        )
    return given


def counted_tokens(routing: Routing) -> Tensor:
    """0-d int64: tokens that count."""
    if routing.mask is not None:
        return routing.mask.sum()
    return torch.full((), routing.logits.shape[0], dtype=torch.int64, device=routing.logits.device)


def without_padding(logits: Tensor, counted: Tensor | None) -> Tensor:
    """Logits in float32 or float64, zero for padding, whose own may be NaN."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if counted is None else wide.masked_fill(~counted.unsqueeze(1), 0)


def probabilities(logits: Tensor, score: Score) -> Tensor:
    """`[tokens, num_experts]` that sum to one for each token, as `score` says."""
    if score not in SCORES:
        raise UnknownNameError("score", score, SCORES)
    if score == "softmax":
        return logits.softmax(-1)
    sigmoids = logits.sigmoid()
    # All may underflow; DeepSeek-V3 has the same floor.
    return sigmoids / (sigmoids.sum(-1, keepdim=True) + 1e-20)


def summed(routings: Sequence[Routing], of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of `of(logits)` `[tokens, ...]` over the tokens that count, and how many those are."""
    device, sums, tokens = routings[0].logits.device, [], []
    for routing in routings:
        values = of(without_padding(routing.logits, routing.mask))
        if routing.mask is not None:
            values = torch.where(routing.mask.unsqueeze(1) if values.dim() > 1 else routing.mask, values, 0)
        sums.append(values.sum(0).to(device))
        tokens.append(counted_tokens(routing).to(device))
    return torch.stack(sums).sum(0), torch.stack(tokens).sum(0)


def weighted(loss: Tensor, number: Tensor, group: "ProcessGroup | None") -> Tensor:
    """A rank's loss such that its mean over the group is weighted by what each rank counts."""
    if group is None:
        return loss
    everywhere = number.clone()
    dist.all_reduce(everywhere, group=group)
    return loss * (number.to(loss.dtype) * group.size() / everywhere.clamp(min=1))
