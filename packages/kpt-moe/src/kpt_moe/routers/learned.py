"""A router whose gate is a small network."""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe._checks import require_size
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import elementwise, linear

from .base import RouterOptions
from .top_k import TopKRouter


class TopKOptions(RouterOptions, total=False):
    """Arguments of `TopKRouter` that routers built upon it hand on."""

    score: str
    renormalize: bool
    scale: float
    num_groups: int
    top_groups: int
    correction_bias: bool


class LearnedRouter(TopKRouter):
    """Choose as `TopKRouter` does, by the logits of a network with one hidden layer instead of a linear gate.

    Logits are `weight @ norm(activation(inner_weight @ x + inner_bias)) + bias`, as in the gating networks of the Deep
    Mixture of Experts (arXiv:1312.4314): a linear gate can but cut the space of tokens by planes. All of it is computed
    in float32, or float64 for float64 tokens.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        inner_size: width of the hidden layer; None is `hidden_size`.
        activation: any name of `kpt_moe.Activation`; a gated one gives `inner_weight` twice as many rows.
        normalize: RMS-normalise the hidden layer, with a learned weight, so that logits of any activation have unit
            variance at first.
        bias: give both layers a bias.
        device: of the parameters.
        dtype: of the parameters; they are raised to the tokens' float32 or float64 where they are used.
        options: `score`, `renormalize`, `scale`, `num_groups`, `top_groups`, `correction_bias` as in `TopKRouter`;
            `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority` as in `Router`.

    Raises:
        InputError: a size is not positive, or as in `TopKRouter`.
        UnknownNameError: no such activation, or as in `TopKRouter`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        inner_size: int | None = None,
        activation: str = "silu",
        normalize: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TopKOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, bias=bias, device=device, dtype=dtype, **options)
        self.inner_size = inner_size if inner_size is not None else hidden_size
        require_size(type(self).__name__, "inner_size", self.inner_size)
        self.activation = Activation(activation)
        self.normalize = normalize

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = self.inner_size * (2 if self.activation.gated else 1)
        self.inner_weight = parameter(rows, hidden_size)
        self.inner_bias = parameter(rows) if bias else None
        self.norm_weight = parameter(self.inner_size) if normalize else None
        self.weight = parameter(num_experts, self.inner_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `size ** -0.5` of what a layer reads; biases zero, the norm one."""
        super().reset_parameters()
        # The constructor of the class above comes by before these are there.
        if hasattr(self, "norm_weight"):
            nn.init.normal_(self.inner_weight, std=self.hidden_size**-0.5)
            if self.inner_bias is not None:
                nn.init.zeros_(self.inner_bias)
            if self.norm_weight is not None:
                nn.init.ones_(self.norm_weight)

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype."""
        bias = None if self.inner_bias is None else self.inner_bias.to(x.dtype)
        return super().gate(elementwise(self._hidden, linear(x, self.inner_weight.to(x.dtype), bias)))

    def _hidden(self, h: Tensor) -> Tensor:
        hidden = self.activation(h)
        if self.norm_weight is None:
            return hidden
        return F.rms_norm(hidden, (self.inner_size,), self.norm_weight.to(h.dtype), eps=1e-6)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        shown = f"{super().extra_repr()}, inner_size={self.inner_size}, activation={self.activation.name!r}"
        return f"{shown}{', normalize=True' * self.normalize}"
