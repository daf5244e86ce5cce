"""Products of 16-bit numbers with sums in float32, of which kernels for GPUs without 8-bit products are made."""

import torch
from torch import Tensor

from kpt_fp8.scales import BLOCKS

#: What shares a scale that may multiply the sums.
OUTSIDE = tuple(name for name, (_, columns) in BLOCKS.items() if columns is None)


def apart(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of bfloat16 whose sum is float32 numbers up to 2**-17 of them."""
    high = numbers.bfloat16()
    return high, (numbers - high.float()).bfloat16()


def sums(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in float32, of 16-bit numbers whose products tensor cores take where torch says so."""
    if a.is_cuda and a.dtype is not torch.float32:
        product: Tensor = torch.mm(a, b, out_dtype=torch.float32)
        return product
    return a.float() @ b.float()
