"""`moe.top_k_gating` natively: scores, choice and weights of a token in one pass, and the gradient of the logits."""

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.structures import SCORES
from kpt_backend_cpu.tensors import DTYPES, empty_as, readable, readable_call, rows
from kpt_core import Call

NAME = "moe.top_k_gating"


def unsupported(call: Call) -> str | None:
    """Why a call is not for this kernel, or None."""
    bias = call.correction_bias
    return None if bias is None or bias.dtype is torch.float32 else "a correction_bias of float64; needs float32"


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """`moe.top_k_gating`, computed in float32."""
    call = readable_call(NAME, call)
    shape = call.logits.shape[0], call.top_k
    weights = call.logits.new_empty(shape, dtype=torch.float32)
    index = weights.new_empty(shape, dtype=torch.int64)
    if weights.numel() > 0:
        native.run("kpt_top_k_gating", *_numbers(call, weights, index))
    return weights, index


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor, _: None) -> dict[str, Tensor]:
    """The gradient of the logits, from that of the weights."""
    call, grad = readable_call(NAME, call), readable(NAME, "the gradient of the weights", grad, whole=True)
    weights, index = (readable(NAME, "a result", each, whole=True) for each in saved)
    out = empty_as(call.logits)
    if out.numel() > 0:
        native.run("kpt_top_k_gating_backward", *_numbers(call, weights, index), grad.data_ptr(), *rows(out))
    return {"logits": out}


def _numbers(call: Call, weights: Tensor, index: Tensor) -> tuple[float, ...]:
    """The numbers of `structures.TopKGating`."""
    return (
        *(call.logits.data_ptr(), call.logits.stride()[0], DTYPES[call.logits.dtype]),
        0 if call.correction_bias is None else call.correction_bias.data_ptr(),
        weights.data_ptr(),
        index.data_ptr(),
        *call.logits.shape,
        call.top_k,
        call.num_groups,
        call.top_groups,
        SCORES[call.score],
        call.renormalize,
        call.scale,
        torch.get_num_threads(),
    )
