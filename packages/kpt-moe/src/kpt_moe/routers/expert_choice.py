"""Experts that choose their tokens."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from kpt_moe.capacity import expert_capacity

from .base import Choices, LinearOptions, LinearRouter


class ExpertChoiceRouter(LinearRouter):
    """Every expert takes the tokens that it scores highest (arXiv:2202.09368).

    Each takes `ceil(tokens * top_k * capacity_factor / num_experts)` of them, or all there are, so that all experts
    serve the same number by construction. A token may be taken by many experts or by none. Scores are a softmax over
    the experts, and the weights are these scores, not renormalised.

    Routings have the form `[rows, 1]` with `Routing.token`, expert after expert. With a mask, the tokens that count are
    routed as if they were alone; the rows that are left over are no choice (id `num_experts`, token 0).

    The choice looks at the whole batch: a token's experts depend on later tokens and on other sequences. This router
    is therefore not causal, and a language model trained with it doesn't decode as it was trained.

    Args:
        top_k: experts per token, on average.
        shared: as in `LinearRouter`, but for `priority`; an expert takes `capacity_factor` times the average number of
            tokens, 1.0 unless given.

    Raises:
        InputError: as in `Router`.
    """

    refused: ClassVar[tuple[str, ...]] = ("priority",)

    def __init__(self, hidden_size: int, *, num_experts: int, top_k: int, **shared: Unpack[LinearOptions]) -> None:
        shared.setdefault("capacity_factor", 1.0)
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The tokens of the highest scores of each expert, `[num_experts * capacity, 1]`."""
        tokens, experts = scores.shape
        assert self._factor is not None
        # From shapes alone; tokens that don't count can only make the true capacity smaller.
        most = min(tokens, expert_capacity(tokens, top_k=self.top_k, num_experts=experts, factor=self._factor))
        by_expert = scores.t()
        if mask is not None:
            by_expert = by_expert.masked_fill(~mask, float("-inf"))
        places = torch.arange(most, device=scores.device) < self.capacity(scores, mask)
        values, token = by_expert.topk(most, dim=1)
        taken = (places & (values > float("-inf"))).reshape(-1)
        expert = torch.arange(experts, device=scores.device).repeat_interleave(most, output_size=experts * most)
        return torch.where(taken, expert, experts).unsqueeze(1), torch.where(taken, token.reshape(-1), 0)
