"""Feed-forward experts, gated and plain."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from kpt_moe._checks import require_size
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import batch_invariant_mode, invariant_experts
from kpt_moe.experts import experts
from kpt_moe.routing import Routing

from .base import ExpertNetwork, init_fan_in, matrices


class FeedForwardExpert(ExpertNetwork):
    """Two products with an activation between them, for every expert, by op `moe.experts`.

    Weights are stored as transformers stores them: `gate_up_proj` `[num_experts, width, hidden_size]`, where width is
    `2 * intermediate_size` for gated activations and `intermediate_size` for plain ones, and `down_proj`
    `[num_experts, hidden_size, intermediate_size]`.

    Args:
        num_experts: number of experts.
        hidden_size: size of a token.
        intermediate_size: inner width of an expert.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        bias: give both projections a bias.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: a size is not a positive integer.
        UnknownNameError: no such activation.
    """

    has_batch_invariant_mode: ClassVar[bool] = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, hidden_size)
        require_size(type(self).__name__, "intermediate_size", intermediate_size)
        self.intermediate_size = intermediate_size
        self.activation = activation
        width = 2 * intermediate_size if Activation(activation).gated else intermediate_size
        self.gate_up_proj = matrices(num_experts, width, hidden_size, device, dtype)
        self.down_proj = matrices(num_experts, hidden_size, intermediate_size, device, dtype)
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `fan_in ** -0.5` for matrices, zero for biases."""
        init_fan_in(self.gate_up_proj, self.down_proj)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; each token is taken by itself."""
        return routing.apply(x, self.rows).to(x.dtype)

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Op `moe.experts` with these weights: `[rows, hidden_size]`, `[rows, K]` and `[rows, K]`."""
        compute = invariant_experts if batch_invariant_mode() else experts
        return compute(
            x,
            index,
            weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return (
            f"{self.num_experts}, {self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.activation!r}, bias={self.down_proj_bias is not None}"
        )
