"""What every loss of routers needs: sums over the tokens that count, and their weight among ranks."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from kpt_core import InputError
from kpt_moe._checks import require_known
from kpt_moe.routing import SCORES as SCORES
from kpt_moe.routing import Routing
from kpt_moe.top_k_gating import score_experts

#: How logits become a token's probabilities: a softmax (for `softmax_after` too, of all experts); or sigmoids, or roots
#: of softplus, divided by their sum (DeepSeek-V3, V4).
Score = Literal["softmax", "softmax_after", "sigmoid", "sqrtsoftplus"]

Routings = Routing | Sequence[Routing]


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


def without_padding(logits: Tensor, counted: Tensor | None) -> Tensor:
    """Logits in float32 or float64, zero for padding, whose own may be NaN."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if counted is None else wide.masked_fill(~counted.unsqueeze(1), 0)


def scored(logits: Tensor, score: str) -> Tensor:
    """What experts are chosen and weighed by, `[tokens, num_experts]`; for `softmax_after` the logits."""
    if score != "sqrtsoftplus":
        return score_experts(logits, score)
    # Where softplus underflows, its root would have no gradient.
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def probabilities(logits: Tensor, score: str) -> Tensor:
    """`[tokens, num_experts]` that sum to one for each token, as `score` says."""
    require_known("score", score, SCORES)
    if score in ("softmax", "softmax_after"):
        return logits.softmax(-1)
    scores = scored(logits, score)
    # All may underflow; DeepSeek-V3 has the same floor.
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def summed(
    routings: Sequence[Routing], of: Callable[[Tensor, str], Tensor], score: Score | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of `of(logits, score)` `[tokens, ...]` over the tokens that count, and how many those are.

    None is the score of each routing.
    """
    device, sums, tokens = routings[0].logits.device, [], []
    for routing in routings:
        values = of(without_padding(routing.logits, routing.mask), score or routing.score)
        if routing.mask is not None:
            values = torch.where(routing.mask.unsqueeze(1) if values.dim() > 1 else routing.mask, values, 0)
        sums.append(values.sum(0).to(device))
        tokens.append(routing.counted_tokens().to(device))
    return torch.stack(sums).sum(0), torch.stack(tokens).sum(0)


def weighted(loss: Tensor, number: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A rank's loss such that its mean over the group is weighted by what each rank counts."""
    if group is None:
        return loss
    everywhere = number.clone()
    dist.all_reduce(everywhere, group=group)
    return loss * (number.to(loss.dtype) * group.size() / everywhere.clamp(min=1))
