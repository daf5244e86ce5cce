"""`moe.scaled_grouped_mm` natively: 8-bit weights are widened as they are read."""

import torch
from torch import Tensor

from kpt_backend_cpu.tensors import in_float32, readable, readable_call
from kpt_core import Call

from .products import multiply

NAME = "moe.scaled_grouped_mm"


def unsupported(call: Call) -> str | None:
    """Why a call is not for this kernel, or None."""
    return "a result in float64; needs float32, bfloat16 or float16" if call.out_dtype is torch.float64 else None


def forward(call: Call) -> Tensor:
    """`moe.scaled_grouped_mm`, summed in float32; scales of float64 are rounded to it."""
    call = _prepared(call)
    x, out_dtype = call.x, call.out_dtype
    if out_dtype is None:
        out_dtype = torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    return multiply(NAME, x, call.weight, call.offsets, out_dtype, scale=call.scale, x_scale=call.x_scale)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradient of floating rows: the gradient of the result times the matrices, turned round."""
    turned = _prepared(call._replace(x=readable(NAME, "the gradient of the result", grad)))
    scale = turned.scale.unsqueeze(1) if turned.scale.dim() == 2 else turned.scale
    product = multiply(NAME, turned.x, turned.weight.mT, turned.offsets, call.x.dtype, scale=scale.mT)
    return {"x": product}


def _prepared(call: Call) -> Call:
    """`call` with tensors that the kernel reads, and scales in float32."""
    return in_float32(readable_call(NAME, call, whole=("x_scale",)), "scale", "x_scale")
