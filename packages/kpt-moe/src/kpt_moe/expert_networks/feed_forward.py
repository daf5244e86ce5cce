"""Feed-forward experts, gated and plain."""

from abc import abstractmethod
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_size
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import MODE, invariant_experts
from kpt_moe.experts import experts
from kpt_moe.routing import Routing

from .base import ExpertNetwork, init_fan_in, init_zeros, matrices, vectors


class FeedForwardOptions(TypedDict, total=False):
    """Arguments of `FeedForwardExpert` that networks built upon it hand on."""

    intermediate_size: int | None
    activation: str
    bias: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class TwoProducts(ExpertNetwork):
    """What experts of op `moe.experts` have in common, whatever numbers their matrices hold.

    Attributes:
        intermediate_size: inner width of an expert.
        width: outputs of the first product: `2 * intermediate_size` for gated activations, else `intermediate_size`.
        activation: its name.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, hidden_size: int, *, num_experts: int, intermediate_size: int | None, activation: str) -> None:
        super().__init__(hidden_size, num_experts=num_experts)
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        require_size(type(self).__name__, "intermediate_size", intermediate_size)
        self.intermediate_size = intermediate_size
        self.width = 2 * intermediate_size if Activation(activation).gated else intermediate_size
        self.activation = activation

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; each token is taken by itself."""
        if routing.token is None:
            return self.rows(x, routing.index, routing.weights).to(x.dtype)
        return routing.apply(x, self.rows).to(x.dtype)

    @abstractmethod
    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Op `moe.experts` with these weights: `[rows, hidden_size]`, `[rows, K]` and `[rows, K]`."""

    def sizes(self) -> dict[str, Any]:
        """The arguments that another network of the same sizes is made with."""
        return {
            "hidden_size": self.hidden_size,
            "num_experts": self.num_experts,
            "intermediate_size": self.intermediate_size,
            "activation": self.activation,
            "bias": self.down_proj_bias is not None,
        }

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return (
            f"{self.num_experts}, {self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.activation!r}, bias={self.down_proj_bias is not None}"
        )


class FeedForwardExpert(TwoProducts):
    """Two products with an activation between them, for every expert, by op `moe.experts`.

    Weights are stored as transformers stores them: `gate_up_proj` `[num_experts, width, hidden_size]`, where width is
    `2 * intermediate_size` for gated activations and `intermediate_size` for plain ones, and `down_proj`
    `[num_experts, hidden_size, intermediate_size]`.

    Args:
        intermediate_size: inner width of an expert; None gives four times `hidden_size`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        bias: give both projections a bias.

    Raises:
        InputError: a size is not a positive integer.
        UnknownNameError: no such activation.
    """

    has_batch_invariant_mode: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        intermediate_size: int | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_experts=num_experts, intermediate_size=intermediate_size, activation=activation
        )
        require_bools(type(self).__name__, bias=bias)
        self.gate_up_proj = matrices(num_experts, self.width, hidden_size, device, dtype)
        self.down_proj = matrices(num_experts, hidden_size, self.intermediate_size, device, dtype)
        self.gate_up_proj_bias = vectors(bias, num_experts, self.width, device, dtype)
        self.down_proj_bias = vectors(bias, num_experts, hidden_size, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `fan_in ** -0.5` for matrices, zero for biases."""
        init_fan_in(self.gate_up_proj, self.down_proj)
        init_zeros(self.gate_up_proj_bias, self.down_proj_bias)

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Op `moe.experts` with these weights: `[rows, hidden_size]`, `[rows, K]` and `[rows, K]`."""
        op = invariant_experts if MODE.on else experts
        biases = self.gate_up_proj_bias, self.down_proj_bias
        return op(x, index, weights, self.gate_up_proj, self.down_proj, *biases, activation=self.activation)


def require_feed_forward(owner: str, experts: object) -> None:
    """Raise `InputError` unless it is a `FeedForwardExpert`."""
    if not isinstance(experts, FeedForwardExpert):
        raise InputError(f"{owner}: experts must be a FeedForwardExpert; got {type(experts).__name__}")
