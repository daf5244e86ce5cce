"""`moe.experts` natively: gather, gate and up projection, activation, down projection and weighted sum in one call.

Training saves the input, the pre-activation, the routing and its sorted order, and nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from kpt_core import KptError

from . import experts_ops
from .amx import refusal_for_amx
from .operators import call
from .tensors import differentiates, refusal_of_transforms


def unsupported(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> str | None:
    """Why a call is not for this kernel, or None."""
    if top_k_index.numel() >= 2**31:
        return f"{top_k_index.numel()} pairs; this kernel counts them in 32 bits"
    refused = refusal_for_amx(x.dtype) if gate_up_proj.dtype is x.dtype else None
    return refusal_of_transforms() or refusal_of_weights(top_k_weights) or refused


def refusal_of_weights(top_k_weights: Tensor) -> str | None:
    """Why routing weights can't be read, or None."""
    if top_k_weights.dtype is torch.float64:
        return "routing weights in float64; needs float32, bfloat16 or float16"
    return None


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """`moe.experts`, summed in float32; differentiable once."""
    up, down = (gate_up_proj, down_proj) if transposed else (gate_up_proj.mT, down_proj.mT)
    floats = (x, top_k_weights, up, down, gate_up_proj_bias, down_proj_bias)
    scales = scale_of_stored(gate_up_scale, transposed), scale_of_stored(down_scale, transposed)
    settings = (activation, interleaved, alpha, beta, limit)
    if differentiates(*floats):
        return _Experts.apply(*floats, top_k_index, *scales, settings)  # type: ignore[no-any-return,no-untyped-call]
    arguments = (x, top_k_index, *floats[1:], *scales, *settings, False)
    return call(torch.ops.kpt_backend_cpu.experts.default, experts_ops.forward, *arguments)  # type: ignore[no-any-return]


def scale_of_stored(scale: Tensor | None, transposed: bool) -> Tensor | None:
    """The float32 scale `[experts, a, b]` of matrices `[experts, K, N]`, from that of stored ones."""
    if scale is None:
        return None
    scale = scale.float()
    if scale.dim() == 2:
        return scale.unsqueeze(1)
    return scale if transposed else scale.mT


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top_k_weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        top_k_index: Tensor,
        up_scale: Tensor | None,
        down_scale: Tensor | None,
        settings: tuple[Any, ...],
    ) -> Tensor:
        tensors = (x, top_k_index, top_k_weights, up, down, up_bias, down_bias, up_scale, down_scale)
        out, *sorted_rows = torch.ops.kpt_backend_cpu.experts_training.default(*tensors, *settings)
        ctx.settings = settings
        ctx.save_for_backward(*tensors, *sorted_rows)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        needed = ctx.needs_input_grad[:6]
        with torch.no_grad():
            found = torch.ops.kpt_backend_cpu.experts_backward.default(
                grad, *ctx.saved_tensors, list(needed), *ctx.settings
            )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A graph of the gradients is wanted (create_graph=True): it must not leave these out without a word.
            x, _, *others = ctx.saved_tensors[:7]
            found = _NotTwice.apply(x, *others, grad, *found)  # type: ignore[no-untyped-call]
        return *(g if wanted else None for g, wanted in zip(found, needed, strict=True)), None, None, None, None


class _NotTwice(torch.autograd.Function):
    """Gradients (the last six arguments) tied to what they depend on, so that differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[-6:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise KptError("moe.experts has no second derivative; kpt_moe.composed_experts has one")
