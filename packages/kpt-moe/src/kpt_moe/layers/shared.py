"""Experts that every token goes through."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import MODE, by_rows, invariant_linear
from kpt_moe.expert_networks.base import init_fan_in, init_zeros


class SharedExperts(nn.Module):
    """A dense feed-forward block beside the routed experts (DeepSeekMoE, arXiv:2401.06066).

    Several shared experts are one block of their total width, which computes the same.

    Args:
        hidden_size: size of a token.
        intermediate_size: inner width of all shared experts together.
        activation: as of `FeedForwardExpert`.
        bias: give both projections a bias.
        gated: multiply by the sigmoid of a linear function of the token (Qwen2-MoE).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        intermediate_size: int,
        activation: str = "swiglu",
        bias: bool = False,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = Activation(activation)
        width = 2 * intermediate_size if self.activation.gated else intermediate_size
        self.gate_up_proj = nn.Linear(hidden_size, width, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `fan_in ** -0.5` for matrices, zero for biases, as routed experts."""
        linears = [linear for linear in (self.gate_up_proj, self.down_proj, self.gate) if linear is not None]
        init_fan_in(*(linear.weight for linear in linears))
        init_zeros(*(linear.bias for linear in linears))

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden_size]` to the same."""
        if MODE.on:
            return invariant_dense(x, [self.gate_up_proj], self.down_proj, self.activation, self.gate)
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))


def invariant_dense(
    x: Tensor, ups: Sequence[nn.Module], down: nn.Module, activation: Activation, gate: nn.Module | None
) -> Tensor:
    """A dense feed-forward block on `x` `[tokens, hidden_size]`, each token by itself, times the sigmoid of `gate`.

    Raises:
        InputError: a module is no `nn.Linear` any more (an adapter's), whose rows may not be independent.
    """

    def linear(module: nn.Module, x: Tensor) -> Tensor:
        if type(module) is not nn.Linear:
            raise InputError(
                f"{type(module).__name__} has no batch-invariant form: merge its adapters, or leave batch_invariant()"
            )
        return invariant_linear(x, module.weight, module.bias)

    out = linear(down, by_rows(activation, torch.cat([linear(up, x) for up in ups], dim=-1)))
    return out if gate is None else out * by_rows(torch.sigmoid, linear(gate, x))
