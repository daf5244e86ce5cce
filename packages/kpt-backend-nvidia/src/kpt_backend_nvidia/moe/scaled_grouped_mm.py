"""`moe.scaled_grouped_mm` in Triton: 8-bit weights are widened as they are loaded."""

import torch
from torch import Tensor

from kpt_triton.moe import scaled_grouped_mm as library

from .float8 import refusal_of_float8


def unsupported(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Why a call is not for this kernel, or None."""
    if out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    return refusal_of_float8(x, weight)


def scaled_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`kpt_triton.moe.scaled_grouped_mm.scaled_grouped_mm`."""
    return library.scaled_grouped_mm(x, weight, scale, offsets, x_scale=x_scale, out_dtype=out_dtype)
