"""Share what kernels of attention have in common: the tangent of scores, and how what changes them is handed over."""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The least number of float32: what is subtracted from scores in rows that see nothing.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def tanh(x):
    """The hyperbolic tangent in float32, small arguments' too (Cephes' polynomial)."""
    size = tl.abs(x)
    square = x * x
    small = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    small = x + x * square * ((small + 1.33314422036e-1) * square - 3.33332819422e-1)
    large = 1.0 - 2.0 / (tl.exp(2 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


def single(tensor: Tensor) -> Tensor:
    """Return a tensor of which nothing is in float64, which some of Intel's GPUs lack."""
    return tensor.detach().float() if tensor.dtype is torch.float64 else tensor.detach()


def numbers(tensor: Tensor | None) -> Tensor | None:
    """Return numbers of heads, one beside the other."""
    return None if tensor is None else single(tensor).contiguous()
