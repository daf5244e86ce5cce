"""The contract of every network of experts."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from kpt_moe._checks import require_sequences, require_size
from kpt_moe.routing import Routing


class ExpertNetwork(nn.Module, ABC):
    """The networks of `num_experts` experts, computed together.

    A token with NaN or infinity gets what is not finite, and changes the result of no token that does not look at it;
    only networks that say `needs_sequences` look at neighbours.

    Attributes:
        hidden_size: size of a token, before and after.
        num_experts: number of experts.
        has_batch_invariant_mode: whether it computes in blocks inside of `kpt_moe.batch_invariant()`.
        has_width: whether its constructor takes an `intermediate_size` and an `activation`.
        needs_sequences: whether a token's result depends on its neighbours, so that `cu_seqlens` matters.
    """

    has_batch_invariant_mode: ClassVar[bool] = False
    has_width: ClassVar[bool] = True
    needs_sequences: ClassVar[bool] = False

    def __init__(self, hidden_size: int, *, num_experts: int) -> None:
        super().__init__()
        for what, size in (("hidden_size", hidden_size), ("num_experts", num_experts)):
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

        Raises:
            InputError: x or `cu_seqlens` is of another shape, dtype or device.
        """


def matrices(
    num_experts: int, outputs: int, inputs: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """An unset parameter `[num_experts, outputs, inputs]`."""
    return nn.Parameter(torch.empty(num_experts, outputs, inputs, device=device, dtype=dtype))


def vectors(
    given: bool, num_experts: int, size: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter | None:
    """An unset parameter `[num_experts, size]`, such as biases; None unless it is to be given."""
    return nn.Parameter(torch.empty(num_experts, size, device=device, dtype=dtype)) if given else None


def init_fan_in(*weights: Tensor) -> None:
    """Normal with deviation `inputs ** -0.5` for matrices `[..., outputs, inputs]`."""
    for weight in weights:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def init_zeros(*biases: Tensor | None) -> None:
    """Zero, for those that there are."""
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)


def sequence_of_tokens(owner: str, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`[tokens]` int64: a number for the sequence of each token; tokens past the last sequence are one of their own."""
    if cu_seqlens is None:
        return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    require_sequences(owner, cu_seqlens, x.shape[0], x.device)
    positions = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens, positions, right=True)


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens `[tokens, hidden_size]`, zero where `mask` `[tokens]` is False, whatever they hold there."""
    return x if mask is None else torch.where(mask.unsqueeze(1), x, 0)
