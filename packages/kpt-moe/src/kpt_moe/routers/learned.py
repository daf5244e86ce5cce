"""A router whose gate is a small network."""

from typing import Unpack

import torch
from torch import Tensor, nn

from kpt_moe._checks import require_size
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import elementwise, linear

from .base import LinearOptions
from .top_k import TopKRouter


class TopKOptions(LinearOptions, total=False):
    """Arguments of `TopKRouter` that routers built upon it hand on."""

    score: str
    renormalize: bool | None
    scale: float
    num_groups: int
    top_groups: int
    correction_bias: bool


class LearnedRouter(TopKRouter):
    """Choose as `TopKRouter` does, by the logits of a network with one hidden layer instead of a linear gate.

    Logits are `weight @ activation(inner_weight @ x + inner_bias) + bias`, as in the gating networks of the Deep
    Mixture of Experts (arXiv:1312.4314): a linear gate can but cut the space of tokens by planes. All of it is computed
    in float32, or float64 for float64 tokens.

    Args:
        inner_size: width of the hidden layer; None is `hidden_size`.
        activation: any name of `kpt_moe.activations.Activation`; a gated one gives `inner_weight` twice as many rows.
        options: all that `TopKRouter` takes; `bias` is for both layers.

    Raises:
        InputError: a size is not positive, or as in `TopKRouter`.
        UnknownNameError: no such activation, or as in `TopKRouter`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        inner_size: int | None = None,
        activation: str = "silu",
        **options: Unpack[TopKOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **options)
        self.inner_size = inner_size if inner_size is not None else hidden_size
        require_size(type(self).__name__, "inner_size", self.inner_size)
        self.activation = Activation(activation)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=self.weight.device, dtype=self.weight.dtype))

        rows = self.inner_size * (2 if self.activation.gated else 1)
        self.inner_weight = parameter(rows, hidden_size)
        self.inner_bias = parameter(rows) if self.bias is not None else None
        self.weight = parameter(num_experts, self.inner_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `size ** -0.5` of what a layer reads; biases zero."""
        super().reset_parameters()
        # The constructor of the class above comes by before these are there.
        if hasattr(self, "inner_bias"):
            nn.init.normal_(self.inner_weight, std=self.hidden_size**-0.5)
            if self.inner_bias is not None:
                nn.init.zeros_(self.inner_bias)

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype."""
        bias = None if self.inner_bias is None else self.inner_bias.to(x.dtype)
        return super().gate(elementwise(self.activation, linear(x, self.inner_weight.to(x.dtype), bias)))
