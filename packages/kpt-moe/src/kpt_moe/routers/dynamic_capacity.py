"""Capacity, and the number of experts per token, by the complexity of the input."""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError
from kpt_moe.batch_invariant import linear
from kpt_moe.capacity import Priority

from .base import LinearRouter

#: What a token's complexity is: the entropy of the gate's distribution, or what a learned probe says.
Complexity = Literal["entropy", "learned"]
COMPLEXITIES: tuple[Complexity, ...] = ("entropy", "learned")


class DynamicCapacityRouter(LinearRouter):
    """Choose the `top_k` most probable experts, whose capacity grows with how complex the batch is.

    A token's complexity lies between 0 and 1. The mean over the tokens that count sets the capacity factor between
    `min_capacity_factor` and `max_capacity_factor`, on the device. With `adaptive_top_k` a token moreover keeps only
    the fewest experts whose probabilities add up to `threshold`, at least one ("Harder Tasks Need More Experts",
    arXiv:2403.07652); the others of its `top_k` choices are none, id `num_experts`.

    The complexity is the entropy of the gate's distribution, divided by its greatest possible value,
    `log(num_experts)`: how little the gate knows which expert to take. If it is `learned`, the probabilities of all
    experts but the best are first multiplied by a scalar of the token, `sigmoid(complexity_weight @ x)`, and brought
    back to a sum of one. The scalar is thus how much a token needs more than its best expert: at 0 it has complexity 0
    and that expert alone. It acts upon the weights, and so learns by the same gradients as the gate.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token, at most.
        min_capacity_factor: for complexity 0: an expert takes at most this many times the average number of tokens.
        max_capacity_factor: for complexity 1.
        complexity: `entropy` or `learned`.
        adaptive_top_k: let the number of experts per token depend on it too.
        threshold: what the probabilities of a token's experts must add up to, with `adaptive_top_k`. The paper's value
            is 0.4.
        renormalize: divide the weights of the kept experts by their sum.
        jitter: as in `Router`.
        priority: as in `Router`.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the parameters; they are raised to the tokens' float32 or float64 where they are used.

    Raises:
        InputError: as in `Router`; the factors are not positive and ascending; the threshold is not above 0 and at
            most 1.
        UnknownNameError: no such `complexity` or `priority`.
    """

    partial: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        min_capacity_factor: float = 1.0,
        max_capacity_factor: float = 2.0,
        complexity: Complexity = "entropy",
        adaptive_top_k: bool = False,
        threshold: float = 0.4,
        renormalize: bool = True,
        jitter: float = 0.0,
        priority: Priority = "position",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_experts, top_k, bias=bias, device=device, dtype=dtype, jitter=jitter, priority=priority
        )
        name = type(self).__name__
        if not 0 < min_capacity_factor <= max_capacity_factor < math.inf:
            raise InputError(
                f"{name}: min_capacity_factor must be positive and at most max_capacity_factor; got "
                f"{min_capacity_factor} and {max_capacity_factor}"
            )
        if complexity not in COMPLEXITIES:
            raise UnknownNameError("complexity", complexity, COMPLEXITIES)
        if not 0 < threshold <= 1:
            raise InputError(f"{name}: threshold must be above 0 and at most 1; got {threshold}")
        self.min_capacity_factor = min_capacity_factor
        self.max_capacity_factor = max_capacity_factor
        self.complexity = complexity
        self.adaptive_top_k = adaptive_top_k
        self.threshold = threshold
        self.renormalize = renormalize
        probe = torch.empty(1, hidden_size, device=device, dtype=dtype) if complexity == "learned" else None
        self.complexity_weight = nn.Parameter(probe) if probe is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `LinearRouter`; the learned scalar begins at one half for every token."""
        super().reset_parameters()
        # The constructor of the class above comes by before it is there.
        if getattr(self, "complexity_weight", None) is not None:
            nn.init.zeros_(self.complexity_weight)  # type: ignore[arg-type]

    @property
    def limited(self) -> bool:
        """Always."""
        return True

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype."""
        logits = super().gate(x)
        if self.complexity_weight is None:
            return logits
        others = logits < logits.amax(-1, keepdim=True)
        return logits + others * F.logsigmoid(linear(x, self.complexity_weight.to(x.dtype)))

    def token_complexity(self, scores: Tensor) -> Tensor:
        """`[tokens]` between 0 and 1, of the probabilities `[tokens, num_experts]`."""
        if self.num_experts == 1:
            return scores.new_zeros(scores.shape[0])
        return (-torch.xlogy(scores, scores).sum(-1) / math.log(self.num_experts)).clamp(0, 1)

    def capacity(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens that each expert takes at most, 0-d int64 on the device of the scores."""
        complexity = self.token_complexity(scores)
        tokens = (
            torch.full((), scores.shape[0], dtype=torch.int64, device=scores.device) if mask is None else mask.sum()
        )
        if mask is not None:
            complexity = torch.where(mask, complexity, 0)
        mean = complexity.sum() / tokens.clamp(min=1)
        factor = self.min_capacity_factor + (self.max_capacity_factor - self.min_capacity_factor) * mean
        places = tokens * self.top_k * factor / self.num_experts
        # A rounding error makes no place.
        return torch.ceil(places * (1 - 1e-6)).long()

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The most probable experts; none beyond those that a token needs, if their number adapts."""
        shares, index = scores.topk(self.top_k, dim=-1)
        if not self.adaptive_top_k:
            return index, None
        enough = shares.cumsum(-1) - shares >= self.threshold
        return torch.where(enough, self.num_experts, index), None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The probabilities of the chosen experts, divided by their sum if the constructor says so."""
        weights = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) if self.renormalize else weights

    def extra_repr(self) -> str:
        """For `print(module)`."""
        shown = [f"capacity_factor={self.min_capacity_factor}..{self.max_capacity_factor}"]
        shown += [f"complexity={self.complexity!r}", f"renormalize={self.renormalize}"]
        shown += [f"adaptive_top_k=True, threshold={self.threshold}"] * self.adaptive_top_k
        return ", ".join([super().extra_repr(), *shown])
