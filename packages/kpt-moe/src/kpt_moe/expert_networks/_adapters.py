"""What is added to the products of experts that keep their own weights: low-rank updates and bottlenecks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe._pairs import SortedPairs
from kpt_moe.activations import Activation

from .base import init_fan_in, matrices


class LowRankUpdate(nn.Module):
    """`alpha / rank * lora_B[e] @ lora_A[e]` beside a product of expert `e` (LoRA, arXiv:2106.09685).

    `lora_A` is `[num_experts, rank, inputs]`, random; `lora_B` `[num_experts, outputs, rank]`, zero at first.
    """

    def __init__(
        self,
        num_experts: int,
        inputs: int,
        outputs: int,
        *,
        rank: int,
        alpha: float,
        dropout: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.scale = alpha / rank
        self.dropout = dropout
        self.lora_A = matrices(num_experts, rank, inputs, device, dtype)
        self.lora_B = matrices(num_experts, outputs, rank, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No update: `lora_B` is zero."""
        init_fan_in(self.lora_A)
        nn.init.zeros_(self.lora_B)

    def forward(self, rows: Tensor, pairs: SortedPairs) -> Tensor:
        """The update of sorted pairs, `[pairs, inputs]` to `[pairs, outputs]`."""
        inner = pairs.linear(F.dropout(rows, self.dropout, self.training), self.lora_A)
        return pairs.linear(inner * self.scale, self.lora_B)

    def merged(self, weight: Tensor) -> Tensor:
        """`weight` `[num_experts or 1, outputs, inputs]` with the update in it, a new tensor of all experts."""
        return torch.baddbmm(weight, self.lora_B, self.lora_A, alpha=self.scale)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        experts, outputs, _ = self.lora_B.shape
        return f"{experts}, {self.lora_A.shape[2]}, {outputs}, rank={self.rank}, scale={self.scale}"


class BottleneckAdapter(nn.Module):
    """`up[e](act(down[e](y)))`, with biases, beside the output `y` of a block (adapters, arXiv:1902.00751).

    `up` and its bias are zero at first.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        *,
        rank: int,
        activation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.activation = Activation(activation)
        width = 2 * rank if self.activation.gated else rank
        self.down_proj = matrices(num_experts, width, hidden_size, device, dtype)
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
        self.up_proj = matrices(num_experts, hidden_size, rank, device, dtype)
        self.up_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nothing is added: the projection up is zero."""
        init_fan_in(self.down_proj)
        for zero in (self.down_proj_bias, self.up_proj, self.up_proj_bias):
            nn.init.zeros_(zero)

    def forward(self, rows: Tensor, pairs: SortedPairs) -> Tensor:
        """What is added to sorted pairs, `[pairs, hidden_size]` to the same."""
        inner = self.activation(pairs.linear(rows, self.down_proj, self.down_proj_bias))
        return pairs.linear(inner, self.up_proj, self.up_proj_bias)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        experts, hidden, rank = self.up_proj.shape
        return f"{experts}, {hidden}, rank={rank}, activation={self.activation.name!r}"
