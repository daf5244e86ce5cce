"""The configuration of Mixture-of-Experts layers."""

from dataclasses import dataclass

from kpt_moe._checks import require_size
from kpt_moe.activations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and choices of a Mixture-of-Experts layer.

    Attributes:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        intermediate_size: inner width of an expert; None gives four times `hidden_size`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        bias: give both projections of an expert a bias.
        score: how the router scores experts, see `TopKRouter`.
        renormalize: make the weights of a token's experts sum to one.

    Raises:
        InputError: a size is not positive, or `top_k` exceeds `num_experts`.
        UnknownNameError: no such activation.
    """

    hidden_size: int
    num_experts: int
    top_k: int = 2
    intermediate_size: int | None = None
    activation: str = "swiglu"
    bias: bool = False
    score: str = "softmax"
    renormalize: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts"):
            require_size("MoEConfig", name, getattr(self, name))
        require_size("MoEConfig", "top_k", self.top_k, self.num_experts, "num_experts")
        if self.intermediate_size is not None:
            require_size("MoEConfig", "intermediate_size", self.intermediate_size)
        Activation(self.activation)

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size
