"""Numbers that tell one rounding from another: ties of a coarser dtype, both zeros, and rows of nothing else."""

from collections.abc import Iterable

import torch
from torch import Tensor

#: Of what a row of ties is multiplied by: `x * (1 / 7)` in float32 misses five of eight ties of float8 that `x / 7`
#: meets, and by 7 the largest number of float8 is still one of bfloat16.
_UNEVEN = 7


def telling(tensor: Tensor, results: Iterable[torch.dtype]) -> Tensor:
    """Other numbers in the place of an argument's, the same in every run.

    One element in eight is a zero of either sign, and so is every third row. The others are ties between two numbers
    of the coarsest dtype among the results, if that is coarser than the argument's; of an 8-bit dtype, whose codes are
    often scaled by the largest element, one in eight is the largest number. Every second row is seven times that, if
    the argument's dtype has such numbers.

    Args:
        tensor: floating [..., n].
        results: dtypes of what must have the reference's bits.
    """
    generator = torch.Generator().manual_seed(0)
    rows = tensor.detach().to("cpu", torch.float64).reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    # A dtype of exponents alone, as scales have it, has an eps of one.
    own = torch.finfo(tensor.dtype).eps
    coarser = [dtype for dtype in results if dtype.is_floating_point and own < torch.finfo(dtype).eps < 1]
    if coarser:
        rows = _ties(rows.shape, max(coarser, key=lambda dtype: torch.finfo(dtype).eps), generator)
        uneven = rows * _UNEVEN
        rows[::2] = (uneven if torch.equal(uneven.to(tensor.dtype).double(), uneven) else rows)[::2]
    zero = torch.randint(8, rows.shape, generator=generator) == 0
    zero[2::3] = True
    sign = 1 - 2 * torch.randint(2, rows.shape, generator=generator).double()
    return (torch.where(zero, 0.0, rows) * sign).view(tensor.shape).to(tensor.device, tensor.dtype)


def _ties(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers in float64, each half-way between two of a dtype, or an 8-bit dtype's largest."""
    info = torch.finfo(dtype)
    steps = round(1 / info.eps)
    significand = 1 + (torch.randint(steps, shape, generator=generator) + 0.5) / steps
    ties = significand * torch.randint(-3, 4, shape, generator=generator).double().exp2()
    largest = torch.randint(8, shape, generator=generator) == 0
    return torch.where(largest, info.max, ties) if dtype.itemsize == 1 else ties
