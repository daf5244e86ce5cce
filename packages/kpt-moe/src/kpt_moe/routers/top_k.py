"""The experts with the highest scores."""

from collections.abc import Callable
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_core.autocast import without_autocast
from kpt_moe._checks import require_bools, require_number
from kpt_moe.batch_invariant import MODE
from kpt_moe.routing import Routing
from kpt_moe.top_k_gating import SCORES as SCORES
from kpt_moe.top_k_gating import check_choice, choose_experts, score_experts, top_k_gating, weigh_experts

from .base import Choices, LinearOptions, LinearRouter


class TopKRouter(LinearRouter):
    """Choose the `top_k` experts with the highest scores of a linear gate (arXiv:1701.06538).

    Args:
        score: `softmax` over all experts (Mixtral before 2024, Qwen-MoE, OLMoE), `softmax_after` over the chosen ones
            (gpt-oss; equals `softmax` with `renormalize`), or `sigmoid` (DeepSeek-V3).
        renormalize: divide the chosen weights by their sum; all stay zero where every score underflowed. None does so
            unless `top_k` is 1: every weight would be one, as it is with `softmax_after`, and the gate would learn
            from balancing losses alone.
        scale: what weights are multiplied by in the end (`routed_scaling_factor` of DeepSeek).
        num_groups: split the experts into as many groups of neighbours, and choose within the best `top_groups` alone
            (DeepSeek-V2, arXiv:2405.04434): a token then meets few devices.
        top_groups: groups per token.
        correction_bias: add a buffer `correction_bias` `[num_experts]` to the scores where experts are chosen, not
            where they are weighed: balancing without an auxiliary loss (arXiv:2408.15664, DeepSeek-V3). Always float32;
            `kpt_moe.BiasBalancer` sets it.
        shared: `bias`, `device` and `dtype` as in `LinearRouter`, and the options of `Router`.

    Raises:
        InputError: `top_k` is not between 1 and `num_experts`, the groups do not fit, or `renormalize` is given beside
            `softmax_after`.
        UnknownNameError: no such `score`.
    """

    correction_bias: Tensor | None
    _own_steps: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own_steps = any(
            getattr(cls, step) is not getattr(TopKRouter, step) for step in ("score", "choose", "weigh")
        )

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        renormalize: bool | None = None,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        correction_bias: bool = False,
        **shared: Unpack[LinearOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        check_choice(type(self).__name__, num_experts, top_k, score, num_groups, top_groups)
        require_bools(type(self).__name__, correction_bias=correction_bias)
        require_number(type(self).__name__, "scale", scale)
        self.score_function = score
        if score == "softmax_after":
            if renormalize is not None:
                raise InputError(
                    f"{type(self).__name__}: renormalize={renormalize} has no effect with score='softmax_after', whose "
                    "weights always sum to one: leave it out"
                )
            self.score_of_none = torch.finfo(torch.float32).min
        self.renormalize = self._renormalizes(renormalize)
        self.scale = scale
        self.num_groups = num_groups
        self.top_groups = top_groups
        zeros = torch.zeros(num_experts, device=shared.get("device"), dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", zeros)

    def reset_parameters(self) -> None:
        """As in `LinearRouter`; the correction bias to zero."""
        super().reset_parameters()
        if getattr(self, "correction_bias", None) is not None:
            torch.nn.init.zeros_(self.correction_bias)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None, replay: Routing | None = None
    ) -> Routing:
        """As in `Router`; by one op where nothing comes between scores, choice and weights."""
        between = mask is not None or replay is not None or self.unavailable is not None or self._own_steps
        between = between or (self.training and (self.jitter > 0 or self.dropped is not None))
        if between or self.limited or MODE.on:
            return super().forward(x, mask=mask, token_ids=token_ids, replay=replay)
        self._check(x, None, token_ids, None)
        with without_autocast(x.device.type):
            logits = self.logits(x) if self._own_gate else self._linear_logits(x)
            weights, index = top_k_gating(
                logits,
                self.correction_bias,
                top_k=self.top_k,
                score=self.score_function,
                renormalize=self.renormalize,
                scale=self.scale,
                num_groups=self.num_groups,
                top_groups=self.top_groups,
            )
        return Routing(index, weights, logits, score=self.score_function)

    def score(self, logits: Tensor) -> Tensor:
        """As `score` of the constructor says."""
        return score_experts(logits, self.score_function)

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The highest scores, the correction bias added and all but the best groups left out."""
        return choose_experts(scores, self.correction_bias, self.top_k, self.num_groups, self.top_groups), None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The scores of the chosen experts, normalised and scaled as the constructor says."""
        return weigh_experts(scores, index, self.score_function, self.renormalize, self.scale)

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
