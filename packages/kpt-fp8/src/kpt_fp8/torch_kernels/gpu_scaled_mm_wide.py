"""`fp8.scaled_mm` on GPUs whose library does not multiply the operands: by products of 16 bits, with sums in float32.

Codes are numbers of bfloat16, so that with scales of rows or tensors, which multiply the sums, the product is exact up
to them. With scales of blocks both operands are taken apart into two of bfloat16 each, and three products are added.
"""

import torch
from torch import Tensor

from kpt_core import Call, Refusal
from kpt_fp8.dequantize import dequantize

from .gpu_scaled_mm import short
from .gpu_sums import OUTSIDE, apart, sums

_INFINITE = (torch.float8_e5m2,)


def unsupported(call: Call) -> Refusal | str | None:
    """Return why it does not take a call."""
    if call.out_dtype is torch.float64:
        return "a result in float64; this kernel sums in float32"
    if not call.a.numel() or not call.b.numel():
        return "there is nothing to compute"
    if call.scale_a.dtype is torch.float64 or call.scale_b.dtype is torch.float64:
        return "scales in float64; this kernel sums in float32"
    if call.granularity_a in OUTSIDE and call.granularity_b in OUTSIDE:
        return None
    if call.out_dtype is torch.float32:
        return "a result in float32 of scales of blocks; needs 16 bits, which two parts of a number suffice for"
    if call.a.dtype in _INFINITE or call.b.dtype in _INFINITE:
        return Refusal("{a} by {b} with scales of blocks; infinity has no two parts", a=short(call.a.dtype),
                       b=short(call.b.dtype))  # fmt: skip
    return None


def forward(call: Call) -> Tensor:
    """Return the product, rounded once."""
    scale_a, scale_b = call.scale_a.float(), call.scale_b.float()
    if call.granularity_a in OUTSIDE and call.granularity_b in OUTSIDE:
        out = sums(call.a.bfloat16(), call.b.bfloat16()) * scale_a.view(-1, 1) * scale_b
    else:
        left = dequantize(call.a, scale_a, granularity=call.granularity_a, dtype=torch.float32)
        own = scale_b.t() if scale_b.dim() == 2 else scale_b
        right = dequantize(call.b.t(), own, granularity=call.granularity_b, dtype=torch.float32)
        (high, low), (other_high, other_low) = apart(left), apart(right)
        out = sums(high, other_high.t()) + sums(high, other_low.t()) + sums(low, other_high.t())
    if call.bias is not None:
        out = out + call.bias
    narrow: Tensor = out.to(call.out_dtype)
    return narrow
