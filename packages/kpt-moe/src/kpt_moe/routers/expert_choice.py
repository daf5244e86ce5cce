"""Experts that choose their tokens."""

import torch
from torch import Tensor

from kpt_moe._checks import require_size
from kpt_moe.capacity import expert_capacity

from .base import LinearRouter

#: Rounds of offers under a limit of experts per token. What the last one leaves unsettled are free places.
_ROUNDS = 16


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
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token, on average.
        capacity_factor: an expert takes this many times the average number of tokens.
        eval_capacity_factor: the same outside of training; None is `capacity_factor`.
        max_experts_per_token: no token is taken by more experts. Experts offer their places to their best tokens, a
            token keeps the offers of the highest scores, and experts that were refused offer to their next tokens:
            the result is that of going greedily through all pairs by score. There are 16 rounds of that; where they
            don't suffice, or the tokens don't, an expert serves fewer.
        jitter: as in `Router`.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: as in `Router`; `max_experts_per_token` is not between 1 and `num_experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float | None = None,
        max_experts_per_token: int | None = None,
        jitter: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            jitter=jitter,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        if max_experts_per_token is not None:
            require_size(
                type(self).__name__, "max_experts_per_token", max_experts_per_token, num_experts, "num_experts"
            )
        self.max_experts_per_token = max_experts_per_token

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens of the highest scores of each expert, `[num_experts * capacity, 1]`."""
        tokens, experts = scores.shape
        assert self._factor is not None
        # From shapes alone; padding can only make the true capacity smaller.
        most = min(tokens, expert_capacity(tokens, self.top_k, experts, self._factor))
        by_expert = scores.t()
        if mask is not None:
            by_expert = by_expert.masked_fill(~mask, float("-inf"))
        places = torch.arange(most, device=scores.device) < self.capacity(scores, mask)
        if self.max_experts_per_token is not None and self.max_experts_per_token < experts:
            by_expert = self._within_limit(by_expert, places, self.max_experts_per_token)
        values, token = by_expert.topk(most, dim=1)
        taken = (places & (values > float("-inf"))).reshape(-1)
        expert = torch.arange(experts, device=scores.device).repeat_interleave(most, output_size=experts * most)
        return torch.where(taken, expert, experts).unsqueeze(1), torch.where(taken, token.reshape(-1), 0)

    @staticmethod
    def _within_limit(by_expert: Tensor, places: Tensor, limit: int) -> Tensor:
        """The scores `[num_experts, tokens]`, those of the pairs that aren't made replaced by minus infinity."""
        low = float("-inf")
        open_to_offers = by_expert
        kept = by_expert
        for _ in range(_ROUNDS):
            best = open_to_offers.topk(places.shape[0], dim=1).indices
            offered = torch.zeros_like(by_expert, dtype=torch.bool).scatter(1, best, places.expand_as(best))
            offers = open_to_offers.masked_fill(~offered, low)
            held = torch.zeros_like(offered).scatter(0, offers.topk(limit, dim=0).indices, True) & offered
            kept = open_to_offers.masked_fill(~held, low)
            open_to_offers = open_to_offers.masked_fill(offered & ~held, low)
        return kept

    def extra_repr(self) -> str:
        """For `print(module)`."""
        limit = self.max_experts_per_token
        return super().extra_repr() + (f", max_experts_per_token={limit}" if limit is not None else "")
