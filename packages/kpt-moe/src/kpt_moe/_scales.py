"""The scales of 8-bit weights, and the numbers that these stand for."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: What scales may be: float32, and float64 where all is widened to that.
SCALE_DTYPES = (torch.float32, torch.float64)
#: Rows and columns that share one scale in blockwise scales.
SCALE_BLOCK = 128


def in_blocks(*sizes: int) -> list[int]:
    """How many blocks each of these sizes has."""
    return [-(-size // SCALE_BLOCK) for size in sizes]


def spread(scale: Tensor, size: int, dim: int) -> Tensor:
    """The scale with `size` entries along `dim`, of which it has one for each block; one for all and `size` stay."""
    if scale.shape[dim] in (1, size):
        return scale
    whole = scale.repeat_interleave(SCALE_BLOCK, dim=dim, output_size=scale.shape[dim] * SCALE_BLOCK)
    return whole.narrow(dim, 0, size)


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times their scales.

    Args:
        codes: `[..., K, N]` of a float8 dtype.
        scale: `[..., a, b]`; `a` is 1, K or the number of blocks in K, and so is `b` for N.
        dtype: float32 or float64.

    Returns:
        `[..., K, N]` of `dtype`.
    """
    rows, columns = codes.shape[-2:]
    return codes.to(dtype) * spread(spread(scale.to(dtype), columns, -1), rows, -2)


def multiplied(stored: Tensor, scale: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """Stored matrices of experts as rows are multiplied by them.

    Args:
        stored: `[num_experts, outputs, inputs]`, its last two exchanged if `transposed`.
        scale: None, `[num_experts, outputs]`, or blocks in the order of the stored matrices.
        transposed: the matrices are stored as input by output.

    Returns:
        The matrices `[num_experts, inputs, outputs]`, and their scale `[num_experts, a, b]`, None if they have none.
    """
    weight = stored if transposed else stored.mT
    if scale is None or scale.dim() == 3:
        return weight, scale if scale is None or transposed else scale.mT
    return weight, scale.unsqueeze(1)


def has_one_of(tensor: Tensor, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether a tensor has one of these shapes; size by size, since compilers make one formula of whole lists."""
    for shape in shapes:
        if len(shape) == tensor.dim() and all(a == b for a, b in zip(tensor.shape, shape, strict=True)):
            return True
    return False


def one_of(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as a message lists them."""
    *others, last = dict.fromkeys(str(list(shape)) for shape in shapes)
    return f"{', '.join(others)} or {last}" if others else last
