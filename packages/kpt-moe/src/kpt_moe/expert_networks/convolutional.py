"""Experts with a convolution over a token's neighbours."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe._checks import require_bools, require_size, require_tokens
from kpt_moe.routing import Routing

from .base import ExpertNetwork, init_zeros, matrices, sequence_of_tokens, vectors, without_padding
from .feed_forward import FeedForwardExpert, FeedForwardOptions


class ConvolutionalExpert(ExpertNetwork):
    """A depthwise convolution along the sequence and a feed-forward network after it, both of each expert's own.

    `y = down_e(act(up_e(c)))` with `c = sum_j conv_weight[e, j] * x[t + j - before] + conv_bias[e]`: the depthwise
    separable convolution (MobileNets, arXiv:1704.04861) in one dimension, its pointwise part the gated or plain network
    of `FeedForwardExpert`. The neighbours are those of the token in its sequence, whichever experts they go to
    themselves; beyond the sequence's ends, and where there is padding, they count as zero. A neighbour with NaN or
    infinity is NaN to those whose window it is in.

    Only the routed pairs are computed. Backward keeps the kernel of every pair, `[pairs, kernel_size, hidden_size]`.

    Args:
        kernel_size: tokens that a convolution sees.
        causal: the window ends at the token; otherwise `(kernel_size - 1) // 2` tokens lie before it and
            `kernel_size // 2` after it.
        pointwise: `intermediate_size`, `activation`, `bias` (of the convolution too), `device` and `dtype`, as in
            `FeedForwardExpert`.

    Raises:
        InputError: a size is not a positive integer.
        UnknownNameError: no such activation.
    """

    needs_sequences: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        kernel_size: int = 3,
        causal: bool = True,
        **pointwise: Unpack[FeedForwardOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts)
        require_size(type(self).__name__, "kernel_size", kernel_size)
        self.kernel_size = kernel_size
        require_bools(type(self).__name__, causal=causal)
        self.causal = causal
        device, dtype = pointwise.get("device"), pointwise.get("dtype")
        self.conv_weight = matrices(num_experts, kernel_size, hidden_size, device, dtype)
        self.conv_bias = vectors(pointwise.get("bias", False), num_experts, hidden_size, device, dtype)
        self.pointwise = FeedForwardExpert(hidden_size, num_experts=num_experts, **pointwise)
        self._reset_convolution()

    def reset_parameters(self) -> None:
        """Kernels normal with deviation `kernel_size ** -0.5`, biases zero; the rest as in `FeedForwardExpert`."""
        self._reset_convolution()
        self.pointwise.reset_parameters()

    def _reset_convolution(self) -> None:
        nn.init.normal_(self.conv_weight, std=self.kernel_size**-0.5)
        init_zeros(self.conv_bias)

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; a token's neighbours are those of its sequence."""
        require_tokens(type(self).__name__, x, self.hidden_size)
        windows = self._windows(without_padding(x, routing.mask), cu_seqlens)
        return routing.apply(windows.flatten(1), self.rows).to(x.dtype)

    def _windows(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """`[tokens, kernel_size, hidden_size]`: the neighbours of each token, zero where its sequence has none."""
        tokens = x.shape[0]
        after = 0 if self.causal else self.kernel_size // 2
        before = self.kernel_size - 1 - after
        sequence = sequence_of_tokens(type(self).__name__, x, cu_seqlens)
        around_x, around_sequence = F.pad(x, (0, 0, before, after)), F.pad(sequence, (before, after), value=-1)
        return torch.stack(
            [
                torch.where((around_sequence[j : j + tokens] == sequence).unsqueeze(1), around_x[j : j + tokens], 0)
                for j in range(self.kernel_size)
            ],
            dim=1,
        )

    def rows(self, windows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Each row's experts, weighted and summed: `[rows, kernel_size * hidden_size]` to `[rows, hidden_size]`."""
        wide = torch.promote_types(windows.dtype, torch.float32)
        expert = index.clamp(0, self.num_experts - 1)
        # One neighbour of all rows at a time, for all choices of a row: [rows, 1, hidden_size].
        neighbours = windows.to(wide).view(-1, 1, self.kernel_size, self.hidden_size).unbind(2)
        seen = torch.zeros((), dtype=wide, device=windows.device)
        for neighbour, kernel in zip(neighbours, self.conv_weight.unbind(1), strict=True):
            seen = seen + neighbour * kernel[expert]
        if self.conv_bias is not None:
            seen = seen + self.conv_bias[expert]
        pairs = seen.to(windows.dtype).flatten(0, 1)
        # Each pair has an input of its own here, so it is a row with one choice.
        out = self.pointwise.rows(pairs, index.reshape(-1, 1), weights.reshape(-1, 1))
        return out.view(*index.shape, self.hidden_size).sum(1, dtype=wide)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{self.num_experts}, {self.hidden_size}, kernel_size={self.kernel_size}, causal={self.causal}"
