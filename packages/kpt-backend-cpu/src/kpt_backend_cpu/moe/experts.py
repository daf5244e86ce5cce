"""`moe.experts` natively: gather, gate and up projection, activation, down projection and weighted sum in one call."""

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.amx import refusal_for_amx
from kpt_backend_cpu.tensors import empty_as, matrices, readable, rows
from kpt_core import Call, Refusal

from .experts_numbers import NAME, WIDE_WEIGHTS, has_pairs, numbers, prepared


def unsupported(call: Call) -> Refusal | str | None:
    """Why a call is not for this kernel, or None."""
    pairs, dtype = call.top_k_index.numel(), call.x.dtype
    if pairs >= 2**31:
        return Refusal("{pairs} pairs; this kernel counts them in 32 bits", pairs=pairs)
    refused = refusal_for_amx(dtype) if call.gate_up_proj.dtype is dtype else None
    return WIDE_WEIGHTS if refused is None and call.top_k_weights.dtype is torch.float64 else refused


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`moe.experts`, summed in float32, and what backward needs."""
    call = prepared(call)
    x, index, up = call.x, call.top_k_index, call.gate_up_proj
    num_experts, width = up.shape[0], up.shape[2 if call.transposed else 1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = x.new_empty(index.numel(), width) if call.needs else None
    order = index.new_empty(index.numel(), dtype=torch.int32)
    offsets = order.new_empty(num_experts)
    places = index.data_ptr(), index.dtype is torch.int64, order.data_ptr(), offsets.data_ptr()
    native.run("kpt_sort", *places, index.numel(), num_experts)
    if has_pairs(call):
        native.run("kpt_experts_forward", *numbers(call, out, order, offsets, h))
    else:
        out.zero_()
        h = None if h is None else h.zero_()
    return out, () if h is None else (h, order, offsets)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients of `moe.experts`, each in the memory order of its argument."""
    call, grad = prepared(call), readable(NAME, "the gradient of the result", grad)
    found = {name: empty_as(getattr(call, name)) for name in call.needs}
    if not has_pairs(call):
        return {name: each.zero_() for name, each in found.items()}
    h, order, offsets = (readable(NAME, "a tensor saved for backward", each) for each in saved)
    native.run(
        "kpt_experts_backward",
        *numbers(call, None, order, offsets, h),
        *rows(grad),
        *rows(found.get("x")),
        *rows(found.get("top_k_weights")),
        *matrices(found.get("gate_up_proj"), by_output=not call.transposed),
        *matrices(found.get("down_proj"), by_output=not call.transposed),
        *rows(found.get("gate_up_proj_bias")),
        *rows(found.get("down_proj_bias")),
    )
    return found
