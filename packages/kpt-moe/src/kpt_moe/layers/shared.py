"""Experts that every token goes through."""

import torch
from torch import Tensor, nn

from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import batch_invariant_mode, by_rows, invariant_linear


class SharedExperts(nn.Module):
    """A dense feed-forward block beside the routed experts (DeepSeekMoE, arXiv:2401.06066).

    Several shared experts are one block of their total width, which computes the same.

    Args:
        hidden_size: size of a token.
        intermediate_size: inner width of all shared experts together.
        activation: as of `FeedForwardExpert`.
        bias: give both projections a bias.
        gated: multiply by the sigmoid of a linear function of the token (Qwen2-MoE).
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
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
        for linear in (self.gate_up_proj, self.down_proj, self.gate):
            if linear is not None:
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden_size]` to the same."""
        if not batch_invariant_mode():
            out: Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
            return out if self.gate is None else out * torch.sigmoid(self.gate(x))
        up, down = self.gate_up_proj, self.down_proj
        a = by_rows(self.activation, invariant_linear(x, up.weight, up.bias))
        out = invariant_linear(a, down.weight, down.bias)
        return out if self.gate is None else out * by_rows(torch.sigmoid, invariant_linear(x, self.gate.weight))
