"""`fp8.linear` on GPUs by products of 16-bit numbers with sums in float32: codes are such numbers already.

Beside x in float32 they are widened to that, and torch's own setting says how it is multiplied.

One scale for a tensor or a row multiplies the sums, and the product is exact up to them. Scales of blocks are part of
the weight, which no 16-bit number is then: it is taken apart into two of bfloat16, whose products are added. Quantised
activations are multiplied by `fp8.scaled_mm`, which the vendor's library serves.
"""

import torch
from torch import Tensor

from kpt_core import Call, Refusal
from kpt_fp8.dequantize import dequantize
from kpt_fp8.linear import NONE
from kpt_fp8.quantize import quantize
from kpt_fp8.scaled_mm import scaled_mm

from .gpu_sums import OUTSIDE, apart, sums

#: What shares the scales of activations and weight that `fp8.scaled_mm` has kernels for.
_MULTIPLIED = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"))


def unsupported(call: Call) -> Refusal | str | None:
    """Return why it does not take a call."""
    x, by = call.x, call.granularity
    if x.dtype is torch.float64:
        return "x in float64; this kernel multiplies 16-bit numbers and float32"
    if not (x.numel() and call.weight.numel()):
        return "there is nothing to compute"
    if call.scale.dtype is torch.float64:
        return "scales in float64; this kernel sums in float32"
    if call.activations == NONE:
        if by not in OUTSIDE and x.dtype is torch.float16:
            return Refusal("x in {dtype} and scales of blocks; needs bfloat16, whose range they fit", dtype=x.dtype)
        return None
    if (call.activations, by) not in _MULTIPLIED:
        return Refusal(
            "activations by {a} and a weight by {b}; needs row or tensor of both, or 1x128 and 128x128",
            a=call.activations, b=by,
        )  # fmt: skip
    return None


def forward(call: Call) -> Tensor:
    """Return the result, rounded once."""
    x, weight, scale, bias = call.x, call.weight, call.scale.float(), call.bias
    if call.activations != NONE:
        codes, own = quantize(
            x,
            call.input_scale,
            dtype=call.activation_dtype,
            granularity=call.activations,
            scale_rounding=call.activation_rounding,
        )
        product = scaled_mm(
            codes, weight.t(), own.float(), scale.t() if scale.dim() == 2 else scale, bias,
            granularity_a=call.activations, granularity_b=call.granularity, out_dtype=x.dtype,
        )  # fmt: skip
        # What is not finite leaves NaN.
        product += (x - x).sum(1, keepdim=True)
        return product
    out: Tensor
    if call.granularity in OUTSIDE:
        product = sums(x, weight.to(x.dtype).t())
        if bias is None:  # rounded as it is written: the product is read once
            return torch.mul(product, scale, out=torch.empty_like(product, dtype=x.dtype))
        out = product.mul_(scale)
    elif x.dtype is torch.float32:
        out = x @ dequantize(weight, scale, granularity=call.granularity, dtype=torch.float32).t()
    else:
        high, low = apart(dequantize(weight, scale, granularity=call.granularity, dtype=torch.float32))
        out = sums(x, high.t()) + sums(x, low.t())
    if bias is not None:
        out = torch.add(out, bias, out=torch.empty_like(out, dtype=x.dtype))
    return out.to(x.dtype)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `x` and `bias`."""
    gradients = {}
    if "x" in call.needs:
        scale = call.scale.float()
        if call.granularity in OUTSIDE and grad.dtype is torch.bfloat16:
            codes = call.weight.to(grad.dtype)
            high, low = apart(grad.float() * scale)
            found = sums(high, codes) + sums(low, codes)
        elif grad.dtype is torch.bfloat16:
            high, low = apart(dequantize(call.weight, scale, granularity=call.granularity, dtype=torch.float32))
            found = sums(grad, high) + sums(grad, low)
        else:  # scales may lead out of the range of float16
            numbers = dequantize(call.weight, scale, granularity=call.granularity, dtype=torch.float32)
            found = grad.float() @ numbers
        gradients["x"] = found.to(call.x.dtype)
    if "bias" in call.needs:
        gradients["bias"] = grad.float().sum(0).to(grad.dtype)
    return gradients
