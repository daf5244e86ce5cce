"""The gating of GShard: a first expert, and a second one as often as it weighs."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from kpt_core import InputError

from .base import Choices, LinearOptions, LinearRouter


class GShardRouter(LinearRouter):
    """Two experts per token, weighed by their probabilities divided by the sum of the two (arXiv:2006.16668).

    In training the second expert is used with probability `min(1, 2 * w2)`, where `w2` is its weight: one that hardly
    counts costs nothing then. Otherwise it is no choice, which is not counted as dropped. Algorithm 1 of the paper.

    Args:
        hidden_size: size of a token.
        num_experts: at least two.
        top_k: always 2.

    Raises:
        InputError: `top_k` is not 2, or as in `Router`.
    """

    partial: ClassVar[bool] = True

    def __init__(self, hidden_size: int, *, num_experts: int, top_k: int = 2, **shared: Unpack[LinearOptions]) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        if top_k != 2:
            raise InputError(f"GShardRouter: top_k is always 2; got {top_k}; TopKRouter takes any")

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The two highest scores, the second one left to chance in training."""
        best, index = scores.topk(2, dim=-1)
        if not self.training:
            return index, None
        first, second = index.unbind(1)
        weight = best[:, 1] / best.sum(-1)
        used = torch.rand_like(weight) < 2 * weight
        return torch.stack((first, torch.where(used, second, self.num_experts)), dim=1), None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The scores of the two highest, divided by their sum, whether the second one is used or not."""
        weights = scores.gather(1, index)
        return weights / scores.topk(2, dim=-1).values.sum(-1, keepdim=True)
