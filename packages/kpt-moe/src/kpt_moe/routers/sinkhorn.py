"""Choices balanced by Sinkhorn's algorithm."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from kpt_moe._checks import require_size
from kpt_moe.top_k_gating import score_experts

from .base import Choices, LinearOptions, LinearRouter


class SinkhornRouter(LinearRouter):
    """In training, choose by scores that Sinkhorn's algorithm made balanced; otherwise, the highest scores.

    `exp(logits)` is scaled by rows and columns until every token gives and every expert gets the same, and a token
    chooses its `top_k` highest entries (S-BASE, arXiv:2202.01169; Megatron-LM's load balancing `sinkhorn`). Scaling
    carries no gradient. Weights are those of Megatron-LM: the sigmoid of the raw logits for `top_k=1`, else their
    softmax over all experts, not renormalised. Unlike there, the number of iterations is fixed, so that nothing is
    read on the host, and the scaling is done on logarithms, which don't overflow.

    Choices in training depend on the whole batch; padding takes no part in them. A token that is alone there gives
    every expert the same, so that rounding errors make its choice.

    Args:
        iterations: how often rows and columns are scaled.

    Raises:
        InputError: as in `Router`; `iterations` is not a positive integer.
    """

    mixes: ClassVar[bool] = True

    def __init__(
        self, hidden_size: int, *, num_experts: int, top_k: int, iterations: int = 16, **shared: Unpack[LinearOptions]
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        require_size(type(self).__name__, "iterations", iterations)
        self.iterations = iterations
        self.score_function = "sigmoid" if top_k == 1 else "softmax"

    def score(self, logits: Tensor) -> Tensor:
        """A sigmoid for `top_k=1`, since the softmax of all experts but one carries little gradient; else a softmax."""
        return score_experts(logits, self.score_function)

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The highest scores, balanced in training."""
        if self.training:
            scores = self._balanced(logits, mask)
        return scores.topk(self.top_k, dim=-1).indices, None

    def _balanced(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """The logarithm of the scaled matrix, but for a term of each token, which doesn't change its choice."""
        if mask is not None:
            logits = logits.masked_fill(~mask.unsqueeze(1), 0)
        closed = self._closed()
        columns = logits.new_zeros(1, logits.shape[1])
        for _ in range(self.iterations):
            rows = torch.logsumexp(logits + columns, dim=1, keepdim=True)
            if mask is not None:
                rows = rows.masked_fill(~mask.unsqueeze(1), float("inf"))
            plan = logits - rows
            # Without a token that counts there is nothing to scale.
            columns = -torch.logsumexp(plan, dim=0, keepdim=True).clamp(min=torch.finfo(plan.dtype).min)
            if closed is not None:
                # Or they would be raised to the share of the others.
                columns = columns.masked_fill(closed, 0)
        return logits + columns
