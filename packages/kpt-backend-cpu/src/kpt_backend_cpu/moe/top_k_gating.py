"""`moe.top_k_gating`: natively, scores, choice and weights of a token in one pass, and the gradient of the logits."""

from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.structures import SCORES
from kpt_core import KptError

from .operators import call
from .tensors import address, differentiates, refusal_of_transforms, rows, with_whole_rows

_library = torch.library.Library("kpt_backend_cpu", "FRAGMENT")
_library.define(
    "top_k_gating(Tensor logits, Tensor? correction_bias, int top_k, str score, bool renormalize, float scale, "
    "int num_groups, int top_groups) -> (Tensor, Tensor)"
)
_library.define(
    "top_k_gating_backward(Tensor grad, Tensor logits, Tensor weights, Tensor index, str score, bool renormalize, "
    "float scale) -> Tensor"
)


def unsupported(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> str | None:
    """Why a call is not for this kernel, or None."""
    if correction_bias is not None and correction_bias.dtype is not torch.float32:
        return "a correction_bias of float64; needs float32"
    return refusal_of_transforms()


def top_k_gating(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """`moe.top_k_gating`, computed in float32; differentiable once in the logits."""
    arguments = (logits, correction_bias, top_k, score, renormalize, scale, num_groups, top_groups)
    if not differentiates(logits):
        operator = torch.ops.kpt_backend_cpu.top_k_gating.default
        return call(operator, _top_k_gating, *arguments)  # type: ignore[no-any-return]
    return _Gating.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


class _Gating(torch.autograd.Function):
    """Saves the logits as they came, and the results."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, correction_bias: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
        weights, index = torch.ops.kpt_backend_cpu.top_k_gating.default(logits, correction_bias, *settings)
        ctx.save_for_backward(logits, weights, index)
        ctx.mark_non_differentiable(index)
        ctx.settings = settings[1:4]
        return weights, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = _GatingGradient.apply(grads[0], *ctx.saved_tensors, *ctx.settings)  # type: ignore[no-untyped-call]
        return grad, *(None,) * 7


class _GatingGradient(torch.autograd.Function):
    """Refuses to be differentiated, where torch's `once_differentiable` would give zeros if `grad` is a constant."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        grad: Tensor = torch.ops.kpt_backend_cpu.top_k_gating_backward.default(*arguments)
        return grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise KptError(
            "moe.top_k_gating has no second derivative in kpt_backend_cpu; its reference has one: "
            "kpt_core.use('reference', op='moe.top_k_gating')"
        )


@torch.library.impl(_library, "top_k_gating", "CPU")
def _top_k_gating(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    weights, index = _top_k_gating_fake(logits, correction_bias, top_k)
    logits = with_whole_rows(logits)
    bias = None if correction_bias is None else correction_bias.contiguous()
    if weights.numel() > 0:
        settings = num_groups, top_groups, score, renormalize, scale
        native.run("kpt_top_k_gating", *_call(logits, bias, weights, index, *settings))
    return weights, index


def _call(
    logits: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    index: Tensor,
    num_groups: int,
    top_groups: int,
    score: str,
    renormalize: bool,
    scale: float,
) -> tuple[float, ...]:
    """The numbers of `structures.TopKGating`."""
    return (
        *rows(logits),
        address(bias),
        weights.data_ptr(),
        index.data_ptr(),
        *logits.shape,
        index.shape[1],
        num_groups,
        top_groups,
        SCORES[score],
        renormalize,
        scale,
        torch.get_num_threads(),
    )


@torch.library.impl(_library, "top_k_gating_backward", "CPU")
def _top_k_gating_backward(
    grad: Tensor, logits: Tensor, weights: Tensor, index: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    out: Tensor = _top_k_gating_backward_fake(grad, logits)
    if out.numel() > 0:
        grad, logits, weights, index = (
            grad.contiguous(),
            with_whole_rows(logits),
            weights.contiguous(),
            index.contiguous(),
        )
        forward = _call(logits, None, weights, index, 1, 1, score, renormalize, scale)
        native.run("kpt_top_k_gating_backward", *forward, grad.data_ptr(), *rows(out))
    return out


@torch.library.register_fake("kpt_backend_cpu::top_k_gating", lib=_library)  # type: ignore[untyped-decorator]
def _top_k_gating_fake(
    logits: Tensor, correction_bias: Tensor | None, top_k: int, *settings: Any
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake("kpt_backend_cpu::top_k_gating_backward", lib=_library)  # type: ignore[untyped-decorator]
def _top_k_gating_backward_fake(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)
