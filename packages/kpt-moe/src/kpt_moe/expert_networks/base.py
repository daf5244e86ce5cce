"""The contract of every network of experts."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from kpt_moe._checks import require_size
from kpt_moe.routing import Routing


class ExpertNetwork(nn.Module, ABC):
    """The networks of `num_experts` experts, computed together.

    Attributes:
        num_experts: number of experts.
        hidden_size: size of a token, before and after.
        has_batch_invariant_mode: whether it computes in blocks inside of `kpt_moe.batch_invariant()`.
        has_width: whether its constructor takes an `intermediate_size` and an `activation`.
        needs_sequences: whether a token's result depends on its neighbours, so that `cu_seqlens` matters.
    """

    has_batch_invariant_mode: ClassVar[bool] = False
    has_width: ClassVar[bool] = True
    needs_sequences: ClassVar[bool] = False

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        super().__init__()
        for what, size in (("num_experts", num_experts), ("hidden_size", hidden_size)):
            require_size(type(self).__name__, what, size)
        self.num_experts = num_experts
        self.hidden_size = hidden_size

    @abstractmethod
    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Each token's experts, weighted and summed.

        Args:
            x: `[tokens, hidden_size]`.
            routing: of these tokens.
            cu_seqlens: `[sequences + 1]` int32 on x's device, the tokens at which sequences begin, and the end, for
                networks that look at neighbours; None is one sequence.

        Returns:
            `[tokens, hidden_size]` of x's dtype.
        """


def matrices(
    num_experts: int, outputs: int, inputs: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """An unset parameter `[num_experts, outputs, inputs]`."""
    return nn.Parameter(torch.empty(num_experts, outputs, inputs, device=device, dtype=dtype))


def init_fan_in(*weights: nn.Parameter) -> None:
    """Normal with deviation `inputs ** -0.5` for matrices `[num_experts, outputs, inputs]`."""
    for weight in weights:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
