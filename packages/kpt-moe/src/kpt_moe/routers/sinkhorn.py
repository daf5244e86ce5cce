"""Choices balanced by Sinkhorn's algorithm."""

from typing import Unpack

import torch
from torch import Tensor

from kpt_moe._checks import require_size

from .base import LinearRouter, RouterOptions


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
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        iterations: how often rows and columns are scaled.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the parameters.
        shared: `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority`, as in `Router`.

    Raises:
        InputError: as in `Router`; `iterations` is not a positive integer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        iterations: int = 16,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **shared: Unpack[RouterOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, bias=bias, device=device, dtype=dtype, **shared)
        require_size(type(self).__name__, "iterations", iterations)
        self.iterations = iterations

    def score(self, logits: Tensor) -> Tensor:
        """A sigmoid for `top_k=1`, since the softmax of all experts but one carries little gradient; else a softmax."""
        return logits.sigmoid() if self.top_k == 1 else logits.softmax(-1)

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
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
            plan = logits - torch.logsumexp(logits + columns, dim=1, keepdim=True)
            if mask is not None:
                plan = plan.masked_fill(~mask.unsqueeze(1), float("-inf"))
            # Without a token that counts there is nothing to scale.
            columns = -torch.logsumexp(plan, dim=0, keepdim=True).clamp(min=torch.finfo(plan.dtype).min)
            if closed is not None:
                # Or they would be raised to the share of the others.
                columns = columns.masked_fill(closed, 0)
        return logits + columns

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{super().extra_repr()}, iterations={self.iterations}"
