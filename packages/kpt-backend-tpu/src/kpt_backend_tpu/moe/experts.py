"""`moe.experts` as one function of JAX over grouped products."""

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_backend_tpu.layouts import Activation, Layout
from kpt_core import Call


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output `[tokens, hidden_size]`, and in training what the op saves."""
    x, num_experts = call.x, call.gate_up_proj.shape[0]
    if not call.top_k_index.numel():
        width = call.gate_up_proj.shape[2 if call.transposed else 1]
        order = torch.zeros(0, dtype=torch.int32, device=x.device)
        saved = (x.new_empty(0, width), order, order.new_zeros(num_experts))
        return torch.zeros_like(x), saved if call.needs else ()
    # JAX knows no int64, and of ids past 32 bits the rest may be an expert's.
    index = call.top_k_index
    index = torch.where((index < 0) | (index >= num_experts), num_experts, index).to(torch.int32)
    tensors = (x, index, call.top_k_weights, call.gate_up_proj, call.down_proj)
    biases = (call.gate_up_proj_bias, call.down_proj_bias)
    out, *saved = jax("experts:forward", *tensors, *biases, layout=_layout(call))
    return out, tuple(saved) if call.needs else ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are needed."""
    needs = tuple(call.needs)
    if not call.top_k_index.numel():
        return {name: torch.zeros_like(getattr(call, name)) for name in needs}
    tensors = (call.x, call.top_k_weights, call.gate_up_proj, call.down_proj)
    biases = (call.gate_up_proj_bias, call.down_proj_bias)
    found = jax("experts:backward", *tensors, *biases, *saved, grad, needs=needs, layout=_layout(call))
    return dict(zip(needs, found, strict=True))


def _layout(call: Call) -> Layout:
    return Layout(Activation(call.activation, call.alpha, call.beta, call.limit, call.interleaved), call.transposed)
