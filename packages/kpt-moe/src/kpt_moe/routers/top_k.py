"""The experts with the highest scores."""

from collections.abc import Callable
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError

from .base import LinearRouter, RouterOptions

#: How logits become scores: over all experts before the choice, over the chosen ones after it, or independently.
SCORES = ("softmax", "softmax_after", "sigmoid")


class TopKRouter(LinearRouter):
    """Choose the `top_k` experts with the highest scores of a linear gate (arXiv:1701.06538).

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        score: `softmax` over all experts (Mixtral before 2024, Qwen-MoE, OLMoE), `softmax_after` over the chosen ones
            (gpt-oss; equals `softmax` with `renormalize`), or `sigmoid` (DeepSeek-V3).
        renormalize: divide the chosen weights by their sum; all stay zero where every score underflowed. With `top_k=1`
            every weight is then one, as with `softmax_after`, and the gate learns from balancing losses alone.
        scale: what weights are multiplied by in the end (`routed_scaling_factor` of DeepSeek).
        num_groups: split the experts into as many groups of neighbours, and choose within the best `top_groups` alone
            (DeepSeek-V2, arXiv:2405.04434): a token then meets few devices.
        top_groups: groups per token.
        correction_bias: add a buffer `correction_bias` `[num_experts]` to the scores where experts are chosen, not
            where they are weighed: balancing without an auxiliary loss (arXiv:2408.15664, DeepSeek-V3). Always float32;
            `kpt_moe.BiasBalancer` sets it.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the parameters.
        shared: `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority`, as in `Router`.

    Raises:
        InputError: `top_k` is not between 1 and `num_experts`, or the groups do not fit.
        UnknownNameError: no such `score`.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        correction_bias: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **shared: Unpack[RouterOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, bias=bias, device=device, dtype=dtype, **shared)
        if score not in SCORES:
            raise UnknownNameError("score", score, SCORES)
        if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise InputError(
                f"{type(self).__name__}: num_groups must divide num_experts ({num_experts}) and top_groups be between "
                f"1 and num_groups; got num_groups={num_groups} and top_groups={top_groups}"
            )
        if top_k > num_experts // num_groups * top_groups:
            raise InputError(
                f"{type(self).__name__}: {top_groups} of {num_groups} groups hold "
                f"{num_experts // num_groups * top_groups} experts, fewer than top_k ({top_k}): raise top_groups"
            )
        self.score_function = score
        if score == "softmax_after":
            self.score_of_none = torch.finfo(torch.float32).min
        self.renormalize = renormalize
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", zeros)

    def reset_parameters(self) -> None:
        """As in `LinearRouter`; the correction bias to zero."""
        super().reset_parameters()
        if getattr(self, "correction_bias", None) is not None:
            torch.nn.init.zeros_(self.correction_bias)  # type: ignore[arg-type]

    def score(self, logits: Tensor) -> Tensor:
        """As `score` of the constructor says."""
        if self.score_function == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.score_function == "sigmoid" else logits

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The highest scores, the correction bias added and all but the best groups left out."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if self.num_groups > self.top_groups:
            scores = self._in_best_groups(scores)
        return scores.topk(self.top_k, dim=-1).indices, None

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        grouped = scores.unflatten(-1, (self.num_groups, -1))
        # DeepSeek-V3 judges a group by its two best experts, V2 by its best.
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
        of_group = best.sum(-1) if self.correction_bias is not None else best[..., 0]
        groups = of_group.topk(self.top_groups, dim=-1).indices
        inside = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, groups, True)
        hidden: Tensor = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf"))
        return hidden.flatten(-2)

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The scores of the chosen experts, normalised and scaled as the constructor says."""
        weights = scores.gather(1, index)
        if self.score_function == "softmax_after":
            weights = weights.softmax(-1)
        if self.renormalize:
            # Sigmoids may all underflow; DeepSeek-V3 has the same floor.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if self.scale == 1 else weights * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.correction_bias is not None and self.correction_bias.dtype is not torch.float32:
            # A bias in bfloat16 could not take the small steps by which it is set; nor may it pass through bfloat16.
            self.correction_bias = before.to(self.correction_bias.device, torch.float32)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.correction_bias is not None:
            # With `assign=True` it is the checkpoint's.
            self.correction_bias = self.correction_bias.float()

    def extra_repr(self) -> str:
        """For `print(module)`."""
        shown = [f"score={self.score_function!r}", f"renormalize={self.renormalize}"]
        plain = (("scale", 1.0), ("num_groups", 1), ("top_groups", 1))
        shown += [f"{name}={getattr(self, name)}" for name, default in plain if getattr(self, name) != default]
        return ", ".join(
            [super().extra_repr(), *shown, *(["correction_bias=True"] * (self.correction_bias is not None))]
        )
