"""What the experts of a Mixture-of-Experts layer compute, written token by token from the definitions.

Nothing here uses KPT: autograd through these loops, in float64, is what values and gradients are held to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
ACTIVATIONS = (*PLAIN, *GATED)

#: What gpt-oss computes, with a limit that random numbers cross.
CLAMPED = {"activation": "swiglu", "alpha": 1.702, "beta": 1.0, "limit": 0.7}


def activate(
    h: Tensor,
    activation: str,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """The activation of `h` `[..., width]`."""
    if activation in PLAIN:
        return PLAIN[activation](h)
    half = h.shape[-1] // 2
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else (h[..., :half], h[..., half:])
    if activation != "swiglu":
        return PLAIN[GATED[activation]](gate) * up
    if limit is not None:
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


@dataclass(frozen=True)
class Inputs:
    """The arguments of `moe.experts`."""

    x: Tensor
    index: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def floats(self) -> list[Tensor]:
        """Every floating tensor that is there, in the order of the arguments."""
        tensors = (self.x, self.weights, self.up, self.down, self.up_bias, self.down_bias)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def args(self) -> tuple[Any, ...]:
        """For calling the op."""
        return (self.x, self.index, self.weights, self.up, self.down, self.up_bias, self.down_bias)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same with every floating tensor changed."""
        return replace(
            self,
            **{
                name: change(tensor)
                for name in ("x", "weights", "up", "down", "up_bias", "down_bias")
                if (tensor := getattr(self, name)) is not None
            },
        )

    def leaves(self) -> "Inputs":
        """Copies that want gradients, strides kept."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same in another dtype."""
        return self.map(lambda tensor: tensor.detach().to(dtype))


def make_inputs(
    *,
    tokens: int = 11,
    top_k: int = 3,
    num_experts: int = 5,
    hidden: int = 8,
    inner: int = 6,
    activation: str = "swiglu",
    transposed: bool = False,
    bias: bool = False,
    sentinels: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Random arguments of the op, each token's experts distinct; with `sentinels`, some ids are of no expert here."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    width = 2 * inner if activation in GATED else inner
    known = num_experts + (2 if sentinels else 0)
    choices = [torch.randperm(known, generator=generator)[:top_k] for _ in range(tokens)]
    # Both kinds that mean "not here": beyond the experts, and negative.
    choices = [torch.where(choice == num_experts + 1, -1, choice) for choice in choices]
    return Inputs(
        x=normal(tokens, hidden),
        index=torch.stack(choices) if choices else torch.empty(0, top_k, dtype=torch.int64),
        weights=torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype),
        up=normal(num_experts, *((hidden, width) if transposed else (width, hidden))) * hidden**-0.5,
        down=normal(num_experts, *((inner, hidden) if transposed else (hidden, inner))) * inner**-0.5,
        up_bias=normal(num_experts, width) if bias else None,
        down_bias=normal(num_experts, hidden) if bias else None,
    )


def naive_experts(
    inputs: Inputs,
    *,
    transposed: bool = False,
    activation: str | Callable[[Tensor], Tensor] = "swiglu",
    post_norm: Callable[[Tensor], Tensor] | None = None,
    **parameters: Any,
) -> Tensor:
    """`moe.experts` by one small product per token and choice."""
    num_experts = inputs.up.shape[0]
    rows = []
    for token in range(inputs.x.shape[0]):
        total = torch.zeros(inputs.x.shape[1], dtype=inputs.x.dtype)
        for choice, expert in enumerate(inputs.index[token].tolist()):
            if not 0 <= expert < num_experts:
                continue
            up, down = inputs.up[expert], inputs.down[expert]
            h = inputs.x[token] @ (up if transposed else up.t())
            if inputs.up_bias is not None:
                h = h + inputs.up_bias[expert]
            a = activate(h, activation, **parameters) if isinstance(activation, str) else activation(h)
            y = a @ (down if transposed else down.t())
            if inputs.down_bias is not None:
                y = y + inputs.down_bias[expert]
            if post_norm is not None:
                y = post_norm(y)
            total = total + inputs.weights[token, choice] * y
        rows.append(total)
    return torch.stack(rows) if rows else inputs.x.new_zeros(inputs.x.shape)


def gradients(function: Callable[[Inputs], Tensor], inputs: Inputs, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The function's value and the gradient of each floating input; zero for inputs that it doesn't reach."""
    leaves = inputs.leaves()
    out = function(leaves)
    if not out.requires_grad:
        return out.detach(), [torch.zeros_like(leaf) for leaf in leaves.floats]
    grads = torch.autograd.grad(out, leaves.floats, grad, allow_unused=True)
    return out.detach(), [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.floats, strict=True)
    ]
