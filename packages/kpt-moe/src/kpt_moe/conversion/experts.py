"""Feed-forward experts as other libraries lay them out."""

from typing import Any

import torch
from torch import Tensor, nn

from kpt_moe.activations import Activation
from kpt_moe.expert_networks.base import init_zeros, matrices, vectors
from kpt_moe.expert_networks.feed_forward import TwoProducts
from kpt_moe.experts import experts


class VariantFeedForwardExpert(TwoProducts):
    """`FeedForwardExpert` with every option of op `moe.experts`: gpt-oss's layout and activation, for example.

    A kind of its own, so that what knows the standard layout alone (tensor parallelism, quantisation, adapters)
    refuses it.

    Args:
        hidden_size: as of `FeedForwardExpert`.
        num_experts: as of `FeedForwardExpert`.
        intermediate_size: as of `FeedForwardExpert`.
        bias: as of `FeedForwardExpert`.
        device: as of `FeedForwardExpert`.
        dtype: as of `FeedForwardExpert`.
        activation: with its `alpha`, `beta`, `limit` and whether gate and up are interleaved.
        transposed: matrices are stored as input by output.

    Raises:
        InputError: a size is not a positive integer.
    """

    activation: Activation  # type: ignore[assignment]

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        intermediate_size: int,
        activation: Activation,
        transposed: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_experts=num_experts, intermediate_size=intermediate_size, activation=activation.name
        )
        self.activation = activation
        self.transposed = transposed
        up, down = (self.width, hidden_size), (hidden_size, intermediate_size)
        if transposed:
            up, down = up[::-1], down[::-1]
        self.gate_up_proj = matrices(num_experts, *up, device, dtype)
        self.down_proj = matrices(num_experts, *down, device, dtype)
        self.gate_up_proj_bias = vectors(bias, num_experts, self.width, device, dtype)
        self.down_proj_bias = vectors(bias, num_experts, hidden_size, device, dtype)
        self.reset_parameters()

    @property
    def is_transposed(self) -> bool:
        """`transposed` by transformers' name, under which peft asks which side of a matrix is the input's."""
        return self.transposed

    def reset_parameters(self) -> None:
        """As in `FeedForwardExpert`: normal with deviation `fan_in ** -0.5` for matrices, zero for biases."""
        nn.init.normal_(self.gate_up_proj, std=self.hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=self.intermediate_size**-0.5)
        init_zeros(self.gate_up_proj_bias, self.down_proj_bias)

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As of `FeedForwardExpert`."""
        tensors = (x, index, weights, self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)
        return experts(*tensors, transposed=self.transposed, **options_of(self.activation))

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{super().extra_repr()}, transposed={self.transposed}"


def options_of(activation: Activation) -> dict[str, Any]:
    """An activation as arguments of `moe.experts`."""
    names = ("alpha", "beta", "limit", "interleaved")
    return {"activation": activation.name, **{name: getattr(activation, name) for name in names}}
