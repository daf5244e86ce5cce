"""The Mixture-of-Experts layer and its configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kpt_core import InputError

from .activations import Activation
from .experts import experts
from .routing import Routing, TopKRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and choices of a `MoELayer`.

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
        for name in ("hidden_size", "num_experts", "top_k", "intermediate_size"):
            value = getattr(self, name)
            if name == "intermediate_size" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"MoEConfig: {name} must be a positive integer; got {value!r}")
        if self.top_k > self.num_experts:
            raise InputError(f"MoEConfig: top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})")
        Activation(self.activation)

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size


class MoELayer(nn.Module):
    """A router and its experts: the drop-in for a transformer's feed-forward block.

    No token is dropped. Weights are stored as transformers stores them, `gate_up_proj` (`up_proj`'s place for plain
    activations) `[num_experts, width, hidden_size]` and `down_proj` `[num_experts, hidden_size, intermediate_size]`.

    Example:
        >>> layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=128))
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        inner, hidden = config.expert_width, config.hidden_size
        width = 2 * inner if Activation(config.activation).gated else inner
        self.router = TopKRouter(
            hidden,
            config.num_experts,
            config.top_k,
            score=config.score,
            renormalize=config.renormalize,
            device=device,
            dtype=dtype,
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(config.num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(width, hidden)
        self.down_proj = parameter(hidden, inner)
        self.gate_up_proj_bias = parameter(width) if config.bias else None
        self.down_proj_bias = parameter(hidden) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `fan_in ** -0.5` for matrices, zero for biases; the router as it does itself."""
        self.router.reset_parameters()
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        config = self.config
        return (
            f"{config.hidden_size}, num_experts={config.num_experts}, top_k={config.top_k}, "
            f"intermediate_size={config.expert_width}, activation={config.activation!r}, bias={config.bias}"
        )

    def route(self, x: Tensor) -> Routing:
        """The routing of `x` `[..., hidden_size]`, tokens flattened."""
        return self.router(self._flatten(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: `[..., hidden_size]`.
            routing: a routing of x's flattened tokens to use instead of the router's.

        Returns:
            x's shape and dtype.

        Raises:
            InputError: x's last size is not `hidden_size`.
        """
        tokens = self._flatten(x)
        routing = routing if routing is not None else self.router(tokens)
        out = experts(
            tokens,
            routing.index,
            routing.weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            activation=self.config.activation,
        )
        return out.view(x.shape).to(x.dtype)

    def _flatten(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.config.hidden_size:
            raise InputError(
                f"MoELayer: the last size of x must be hidden_size={self.config.hidden_size}; got {list(x.shape)}"
            )
        return x.reshape(-1, x.shape[-1])
