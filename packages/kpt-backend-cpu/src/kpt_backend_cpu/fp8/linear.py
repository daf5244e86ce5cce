"""`fp8.linear` natively: the weight stays in 8 bits, activations are quantised by the best kernel that is there."""

import math
from collections.abc import Callable
from ctypes import addressof, c_int32
from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.amx import LEFT_TO_PYTORCH, refusal_for_amx
from kpt_backend_cpu.structures import NO_BIAS, SCALES_BLOCK, SCALES_N
from kpt_backend_cpu.tensors import DTYPES, LOW, in_memory
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
        # Infinities saturate when they are quantised; here they have to be seen in the result. A row's largest number
        # tells of them in a tenth of the time that all of its numbers take.
        if call.x.numel():
            spoiled = ~call.x.abs().amax(1, keepdim=True).isfinite()
    scale = call.scale.t() if call.scale.dim() == 2 else call.scale
    out = multiply(NAME, x, call.weight, scale, call.bias, call.x.dtype, x_scale=x_scale, by_output=True)
    return out if spoiled is None else out.masked_fill_(spoiled, math.nan)


def prepare(call: Call) -> Callable[..., Tensor] | None:
    """Return what computes all calls that look like this one, or None where `forward` is as quick."""
    x, weight, scale, make = call.x, call.weight, call.scale, type(call)
    if call.activations != "none" or (LEFT_TO_PYTORCH and x.dtype is torch.bfloat16):
        return None  # then the environment decides
    if not (x.is_contiguous() and weight.is_contiguous() and scale.is_contiguous() and scale.dtype is torch.float32):
        return None
    (count, inner), columns, dtype = x.shape, weight.shape[0], x.dtype
    if 0 in (count, inner, columns) or (scale.dim() == 2 and scale.shape == (columns, 1)):
        return None
    by_block = scale.dim() == 2
    of_x, of_out, of_weight = (inner, DTYPES[dtype]), (columns, DTYPES[dtype]), (0, 1, inner, DTYPES[weight.dtype])
    kind, of_scale = (
        SCALES_BLOCK if by_block else SCALES_N,
        (0, 1, scale.stride(0)) if by_block else (0, 0, scale.dim()),
    )
    shape, sizes, threads = (count, columns), (count, inner, columns, 1), torch.get_num_threads
    end = c_int32(count)
    between = (*of_scale, 0, 0, addressof(end), *sizes)

    def computed(x: Tensor, weight: Tensor, scale: Tensor, *others: Any) -> Tensor:
        place, own, factor = x.data_ptr(), weight.data_ptr(), scale.data_ptr()
        # As `in_memory` does, whose loop takes as long as all else here.
        if place < LOW or own < LOW or factor < LOW or x.is_neg() or weight.is_neg() or scale.is_neg():
            return forward(make(x, weight, scale, *others, (), None))
        bias = others[0]
        if bias is not None and not (bias.is_contiguous() and in_memory(bias)):
            return forward(make(x, weight, scale, *others, (), None))
        out = x.new_empty(shape)
        native.run(
            "kpt_grouped_mm",
            *(place, *of_x, out.data_ptr(), *of_out, own, *of_weight, kind, factor, *between, threads(), 0),
            *(NO_BIAS if bias is None else (bias.data_ptr(), 0, of_x[1])),
        )
        return out

    computed.end = end  # type: ignore[attr-defined]  # lives as long as its address is used
    return computed


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
