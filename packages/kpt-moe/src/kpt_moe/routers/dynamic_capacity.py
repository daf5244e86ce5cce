"""Capacity, and the number of experts per token, by the complexity of the input."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_number
from kpt_moe.top_k_gating import weigh_experts

from .base import Choices, LinearOptions, LinearRouter


class DynamicCapacityRouter(LinearRouter):
    """Choose the `top_k` most probable experts, whose capacity grows with how complex the batch is.

    A token's complexity lies between 0 and 1. The mean over the tokens that count sets the capacity factor between
    `min_capacity_factor` and `max_capacity_factor`, on the device. With `adaptive_top_k` a token moreover keeps only
    the fewest experts whose probabilities add up to `threshold`, at least one ("Harder Tasks Need More Experts",
    arXiv:2403.07652); the others of its `top_k` choices are none, id `num_experts`.

    The complexity is the entropy of the gate's distribution, divided by its greatest possible value,
    `log(num_experts)`: how little the gate knows which expert to take.

    Args:
        top_k: experts per token, at most.
        min_capacity_factor: for complexity 0: an expert takes at most this many times the average number of tokens.
        max_capacity_factor: for complexity 1.
        adaptive_top_k: let the number of experts per token depend on it too.
        threshold: what the probabilities of a token's experts must add up to, with `adaptive_top_k`. The paper's value
            is 0.4, and that of None.
        renormalize: divide the weights of the kept experts by their sum; None does so unless `top_k` is 1, see
            `TopKRouter`.
        shared: as in `LinearRouter`, but for capacity factors.

    Raises:
        InputError: as in `Router`; the factors are not positive and ascending; the threshold is not above 0 and at
            most 1, or is given without `adaptive_top_k`.
        UnknownNameError: no such `priority`.
    """

    partial: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("capacity_factor", "eval_capacity_factor")

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int = 2,
        min_capacity_factor: float = 1.0,
        max_capacity_factor: float = 2.0,
        adaptive_top_k: bool = False,
        threshold: float | None = None,
        renormalize: bool | None = None,
        **shared: Unpack[LinearOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        name = type(self).__name__
        require_bools(name, adaptive_top_k=adaptive_top_k)
        require_number(name, "min_capacity_factor", min_capacity_factor, "a positive number")
        require_number(name, "max_capacity_factor", max_capacity_factor, "a positive number")
        if min_capacity_factor > max_capacity_factor:
            raise InputError(
                f"{name}: min_capacity_factor must be at most max_capacity_factor; got "
                f"{min_capacity_factor} and {max_capacity_factor}"
            )
        if threshold is not None and not adaptive_top_k:
            raise InputError(
                f"{name}: threshold={threshold} has no effect without adaptive_top_k: set that too, or leave it out"
            )
        threshold = 0.4 if threshold is None else threshold
        require_number(name, "threshold", threshold, "above 0 and at most 1")
        self.min_capacity_factor = min_capacity_factor
        self.max_capacity_factor = max_capacity_factor
        self.adaptive_top_k = adaptive_top_k
        self.threshold = threshold
        self.renormalize = self._renormalizes(renormalize)

    @property
    def limited(self) -> bool:
        """Always."""
        return True

    def token_complexity(self, scores: Tensor) -> Tensor:
        """`[tokens]` between 0 and 1, of the probabilities `[tokens, num_experts]`."""
        if self.num_experts == 1:
            return scores.new_zeros(scores.shape[0])
        return (-torch.xlogy(scores, scores).sum(-1) / math.log(self.num_experts)).clamp(0, 1)

    def capacity(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens that each expert takes at most, 0-d int64 on the device of the scores."""
        if mask is None:
            mask = torch.ones_like(scores[:, 0], dtype=torch.bool)
        tokens = mask.sum()
        mean = torch.where(mask, self.token_complexity(scores), 0).sum() / tokens.clamp(min=1)
        factor = self.min_capacity_factor + (self.max_capacity_factor - self.min_capacity_factor) * mean
        places = tokens * self.top_k * factor / self.num_experts
        # A rounding error makes no place.
        return torch.ceil(places * (1 - 1e-6)).long()

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The most probable experts; none beyond those that a token needs, if their number adapts."""
        shares, index = scores.topk(self.top_k, dim=-1)
        if not self.adaptive_top_k:
            return index, None
        enough = shares.cumsum(-1) - shares >= self.threshold
        return torch.where(enough, self.num_experts, index), None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The probabilities of the chosen experts, divided by their sum if the constructor says so."""
        return weigh_experts(scores, index, "softmax", self.renormalize, 1.0)
