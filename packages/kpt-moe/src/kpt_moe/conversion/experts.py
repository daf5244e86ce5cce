"""Feed-forward experts as other libraries lay them out."""

from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._checks import require_size
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import batch_invariant_mode
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.expert_networks.base import matrices
from kpt_moe.experts import experts
from kpt_moe.routing import Routing


class VariantFeedForwardExpert(ExpertNetwork):
    """`FeedForwardExpert` with every option of op `moe.experts`: gpt-oss's layout and activation, for example.

    A kind of its own, so that what knows the standard layout alone (tensor parallelism, quantisation, adapters)
    refuses it.

    Args:
        num_experts: number of experts.
        hidden_size: size of a token.
        intermediate_size: inner width of an expert.
        activation: with its `alpha`, `beta`, `limit` and whether gate and up are interleaved.
        transposed: matrices are stored as input by output.
        bias: give both projections a bias.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: a size is not a positive integer; or, where it is called, `batch_invariant` is in force, which has
            the standard layout alone.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        transposed: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, hidden_size)
        require_size(type(self).__name__, "intermediate_size", intermediate_size)
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.transposed = transposed
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        width = 2 * intermediate_size if activation.gated else intermediate_size
        up, down = (width, hidden_size), (hidden_size, intermediate_size)
        if transposed:
            up, down = up[::-1], down[::-1]
        self.gate_up_proj = matrices(num_experts, *up, **place)
        self.down_proj = matrices(num_experts, *down, **place)
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, width, **place))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `FeedForwardExpert`: normal with deviation `fan_in ** -0.5` for matrices, zero for biases."""
        nn.init.normal_(self.gate_up_proj, std=self.hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=self.intermediate_size**-0.5)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; each token is taken by itself."""
        return routing.apply(x, self.rows).to(x.dtype)

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Op `moe.experts` with these weights: `[rows, hidden_size]`, `[rows, K]` and `[rows, K]`."""
        if batch_invariant_mode():
            raise InputError(
                f"{type(self).__name__}: has no batch-invariant form: leave batch_invariant, or this layer"
            )
        act = self.activation
        return experts(
            x,
            index,
            weights,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            activation=act.name,
            transposed=self.transposed,
            interleaved=act.interleaved,
            alpha=act.alpha,
            beta=act.beta,
            limit=act.limit,
        )

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return (
            f"{self.num_experts}, {self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.activation}, transposed={self.transposed}, bias={self.down_proj_bias is not None}"
        )
