"""Routers: which experts a token goes to, and with what weight."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass

from kpt_core import InputError, UnknownNameError, without_autocast


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decides.

    Attributes:
        index: `[tokens, top_k]` int64, the experts of each token, best first.
        weights: `[tokens, top_k]` float32, how much each of them counts.
        logits: `[tokens, num_experts]` float32, before any normalisation: what load-balancing losses need.
    """

    index: Tensor
    weights: Tensor
    logits: Tensor


# So that torch.export and tree_map see its tensors.
register_dataclass(Routing)

#: How logits become scores: over all experts before the choice, over the chosen ones after it, or independently.
SCORES = ("softmax", "softmax_after", "sigmoid")


class TopKRouter(nn.Module):
    """Choose the `top_k` experts with the highest scores of a linear gate (arXiv:1701.06538).

    The gate's product and the scores are computed in float32 whatever the dtype of the model, since a routing decided
    in bfloat16 differs between devices.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        score: `softmax` over all experts (Mixtral before 2024, Qwen-MoE, OLMoE), `softmax_after` over the chosen ones
            (gpt-oss; equals `softmax` with `renormalize`), or `sigmoid` (DeepSeek-V3).
        renormalize: divide the chosen weights by their sum; all stay zero where every score underflowed.
        bias: give the gate a bias.

    Raises:
        InputError: `top_k` is not between 1 and `num_experts`.
        UnknownNameError: no such `score`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise InputError(f"TopKRouter: top_k must be between 1 and num_experts ({num_experts}); got {top_k}")
        if score not in SCORES:
            raise UnknownNameError("score", score, SCORES)
        self.top_k = top_k
        self.score = score
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `hidden_size ** -0.5`, so that logits of normalised tokens have unit variance."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        num_experts, hidden_size = self.weight.shape
        return (
            f"{hidden_size}, num_experts={num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"renormalize={self.renormalize}, bias={self.bias is not None}"
        )

    def forward(self, x: Tensor) -> Routing:
        """Route `x` `[tokens, hidden_size]`."""
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise InputError(f"TopKRouter: x must be [tokens, {self.weight.shape[1]}]; got {list(x.shape)}")
        with without_autocast(x.device.type):
            bias = None if self.bias is None else self.bias.float()
            logits = F.linear(x.float(), self.weight.float(), bias)
            if self.score == "softmax_after":
                chosen, index = logits.topk(self.top_k, dim=-1)
                weights = chosen.softmax(-1)
            else:
                scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
                weights, index = scores.topk(self.top_k, dim=-1)
            if self.renormalize:
                # Sigmoids may all underflow; DeepSeek-V3 has the same floor.
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(index, weights, logits)
