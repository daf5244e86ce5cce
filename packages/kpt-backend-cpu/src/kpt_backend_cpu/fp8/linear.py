"""`fp8.linear` natively: the weight stays in 8 bits, activations are quantised by the best kernel that is there."""

import math

import torch
from torch import Tensor

from kpt_backend_cpu.amx import refusal_for_amx
from kpt_core import Call, Refusal, get_op

from .products import FORMATS, OF_ROWS, multiply, refusal

NAME = "fp8.linear"


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for this kernel, or None."""
    if call.activations == "none":
        return refusal(call.weight, call.granularity) or refusal_for_amx(call.x.dtype)
    if call.activations not in OF_ROWS or call.activation_dtype not in FORMATS:
        return Refusal(
            "activations of {dtype} by {by}; needs float8_e4m3fn or float8_e5m2 by tensor, row or 1x128",
            dtype=call.activation_dtype,
            by=call.activations,
        )
    return refusal(call.weight, call.granularity)


def forward(call: Call) -> Tensor:
    """Return `[M, N]`, summed in float32 and rounded once."""
    x, x_scale, spoiled = call.x, None, None
    if call.activations != "none":
        x, x_scale = get_op("fp8.quantize")(
            x,
            call.input_scale,
            dtype=call.activation_dtype,
            granularity=call.activations,
            scale_rounding=call.activation_rounding,
        )
        # Infinities saturate when they are quantised; here they have to be seen in the result.
        spoiled = ~call.x.isfinite().all(1, keepdim=True)
    scale = call.scale.t() if call.scale.dim() == 2 else call.scale
    out = multiply(NAME, x, call.weight, scale, call.bias, call.x.dtype, x_scale=x_scale, by_output=True)
    return out if spoiled is None else out.masked_fill_(spoiled, math.nan)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `x` and `bias`."""
    gradients = {}
    if "x" in call.needs:
        # A row of the weight is here what is summed.
        scale = call.scale[:, None] if call.scale.dim() == 1 else call.scale
        gradients["x"] = multiply(NAME, grad, call.weight, scale, None, call.x.dtype)
    if "bias" in call.needs:
        gradients["bias"] = grad.sum(0, dtype=torch.float32).to(grad.dtype)
    return gradients
