"""`fp8.linear`: the weight is decoded part by part."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_fp8.dequantize import dequantize
from kpt_fp8.linear import NONE
from kpt_fp8.quantize import quantize

from .products import product, transposed_product


def forward(call: Call) -> Tensor:
    """Activations are quantised by the best kernel that is there."""
    x, wide = call.x, _wide(call)
    rows = x.to(wide)
    if call.activations != NONE:
        codes, own = quantize(
            x,
            call.input_scale,
            dtype=call.activation_dtype,
            granularity=call.activations,
            scale_rounding=call.activation_rounding,
        )
        # What is not finite leaves NaN here.
        rows = dequantize(codes, own, granularity=call.activations, dtype=wide) + (rows - rows)
    out = product(rows, call.weight, call.scale.to(wide), call.granularity)
    return (out if call.bias is None else out.add_(call.bias)).to(x.dtype)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients of `x` and `bias`."""
    gradients = {}
    wide = grad.to(_wide(call))
    if "x" in call.needs:
        grad_x = transposed_product(wide, call.weight, call.scale.to(wide.dtype), call.granularity)
        gradients["x"] = grad_x.to(call.x.dtype)
    if "bias" in call.needs:
        gradients["bias"] = wide.sum(0).to(grad.dtype)
    return gradients


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.x.dtype is torch.float64 else torch.float32
