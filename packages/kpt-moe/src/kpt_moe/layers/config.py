"""The configuration of Mixture-of-Experts layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kpt_core import InputError, UnknownNameError
from kpt_moe._checks import require_size
from kpt_moe.activations import Activation
from kpt_moe.expert_networks import EXPERTS
from kpt_moe.routers import ROUTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and choices of a Mixture-of-Experts layer.

    Attributes:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token; of the expert-choice router, on average.
        intermediate_size: inner width of an expert; None gives four times `hidden_size`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        bias: give both projections of an expert, and of the shared ones, a bias.
        router: kind of router, a name of `kpt_moe.routers.ROUTERS`.
        score: how the router scores experts, see `TopKRouter`; one that has no such choice takes the default alone.
        renormalize: make the weights of a token's experts sum to one; likewise. With `top_k=1` all are then one, and
            the router learns from balancing losses alone.
        capacity_factor: an expert takes at most this many times the average number of tokens; None is the default of
            the router's class, which is no limit but for `switch` and `expert_choice`.
        eval_capacity_factor: the same outside of training; None is `capacity_factor`, or if that is None too, the
            default of the router's class.
        router_options: further arguments of the router's class.
        expert: kind of experts, a name of `kpt_moe.expert_networks.EXPERTS`.
        expert_options: further arguments of the experts' class.
        num_shared_experts: experts that every token goes through, beside its own (DeepSeekMoE, arXiv:2401.06066).
        shared_intermediate_size: inner width of all shared experts together; None is `num_shared_experts` times the
            width of an expert.
        shared_gate: weigh the shared experts by the sigmoid of a linear function of the token (Qwen2-MoE).

    Raises:
        InputError: a size is not positive, or `top_k` exceeds `num_experts`.
        UnknownNameError: no such activation, router or kind of experts.
    """

    hidden_size: int
    num_experts: int
    top_k: int = 2
    intermediate_size: int | None = None
    activation: str = "swiglu"
    bias: bool = False
    router: str = "top_k"
    score: str = "softmax"
    renormalize: bool = True
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    router_options: Mapping[str, Any] = field(default_factory=dict)
    expert: str = "feed_forward"
    expert_options: Mapping[str, Any] = field(default_factory=dict)
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts"):
            require_size("MoEConfig", name, getattr(self, name))
        require_size("MoEConfig", "top_k", self.top_k, self.num_experts, "num_experts")
        for name in ("intermediate_size", "shared_intermediate_size"):
            if getattr(self, name) is not None:
                require_size("MoEConfig", name, getattr(self, name))
        if self.num_shared_experts != 0:
            require_size("MoEConfig", "num_shared_experts", self.num_shared_experts)
        elif self.shared_gate or self.shared_intermediate_size is not None:
            raise InputError(
                "MoEConfig: shared_gate and shared_intermediate_size are of shared experts, but num_shared_experts is 0"
            )
        Activation(self.activation)
        if self.router not in ROUTERS:
            raise UnknownNameError("router", self.router, ROUTERS)
        if self.expert not in EXPERTS:
            raise UnknownNameError("kind of experts", self.expert, EXPERTS)

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together; 0 if there are none."""
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.expert_width
