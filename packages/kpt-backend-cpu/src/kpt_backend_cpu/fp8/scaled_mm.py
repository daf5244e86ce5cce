"""`fp8.scaled_mm` natively."""

import torch
from torch import Tensor

from kpt_core import Call, Refusal

from .products import OF_ROWS, multiply, refusal


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for this kernel, or None."""
    if call.out_dtype is torch.float64:
        return "a result in float64; needs float32, bfloat16 or float16"
    if call.granularity_a not in OF_ROWS:
        return Refusal("scales of a by {by}; needs tensor, row or 1x128", by=call.granularity_a)
    return refusal(call.b, call.granularity_b)


def forward(call: Call) -> Tensor:
    """Return `[M, N]`, summed in float32 and rounded once."""
    return multiply("fp8.scaled_mm", call.a, call.b, call.scale_b, call.bias, call.out_dtype, x_scale=call.scale_a)
