"""Choosing each token's experts from logits, and weighing them, in one kernel; and the gradient of the weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.launching import inner_contiguous, on_its_device
from kpt_triton.numeric import narrow

#: A program holds the scores of a token, padded to powers of two, in registers.
MAX_EXPERTS = 1024
#: Scores that a program of one warp holds: a token's are never spread over warps, which would have to wait.
_SCORES = 1024

_LEAST = tl.constexpr(-(2**31))
_LOG2E = tl.constexpr(1.4426950408889634)
#: What is lost of it in float32.
_LOG2E_REST = tl.constexpr(1.9259629911266175e-08)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    """`exp(x)` for `x <= 0` or NaN.

    The hardware's base is 2, and the rounding of `x * log2(e)` alone would cost several units in the last place.
    """
    x = tl.where(x < -200.0, -200.0, x)
    power = x * _LOG2E
    rest = tl.fma(x, _LOG2E, -power) + x * _LOG2E_REST
    return tl.exp2(power) * (1.0 + rest * _LN2)


@triton.jit
def _softmax(x):
    """Over the last dimension of two."""
    raised = _exp(x - tl.max(x, 1)[:, None])
    return tl.div_rn(raised, tl.broadcast_to(tl.sum(raised, 1)[:, None], raised.shape))


@triton.jit
def _sigmoid(x):
    raised = _exp(-tl.abs(x))
    return tl.div_rn(tl.where(x < 0, raised, 1.0), 1.0 + raised)


@triton.jit
def _ordered(x):
    """Integers that compare as the numbers do, NaN above all as in torch.topk; none of them is `_LEAST`."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _number(key):
    """The number of such an integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _in_best_groups(
    key, GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """The keys, those outside of a token's best groups `_LEAST`."""
    tile = tl.reshape(key, (TOKENS, GROUPS_PADDED, GROUP_PADDED))
    of_group = tl.max(tile, 2)
    if BY_TWO and GROUP > 1:
        best = tl.arange(0, GROUP_PADDED)[None, None, :] == tl.argmax(tile, 2)[:, :, None]
        of_group = _ordered(_number(of_group) + _number(tl.max(tl.where(best, _LEAST, tile), 2)))
    groups = tl.arange(0, GROUPS_PADDED)[None, :]
    of_group = tl.where(groups < GROUPS, of_group, _LEAST)
    for _ in range(TOP_GROUPS):
        of_group = tl.where(groups == tl.argmax(of_group, 1)[:, None], _LEAST, of_group)
    inside = (of_group == _LEAST) & (groups < GROUPS)
    return tl.reshape(tl.where(inside[:, :, None], tile, _LEAST), (TOKENS, GROUPS_PADDED * GROUP_PADDED))


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    logits, correction_bias, weights, index, tokens, row_stride, scale,
    SCORE: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, GROUPS_PADDED * GROUP_PADDED)
    expert = place // GROUP_PADDED * GROUP + place % GROUP_PADDED
    known = (place // GROUP_PADDED < GROUPS) & (place % GROUP_PADDED < GROUP)
    x = tl.load(
        logits + token[:, None] * row_stride + expert[None, :],
        mask=(token < tokens)[:, None] & known[None, :],
        other=0.0,
    )
    x = tl.where(known[None, :], x.to(tl.float32), float("-inf"))
    if SCORE == "softmax":
        x = _softmax(x)
    elif SCORE == "sigmoid":
        x = _sigmoid(x)
    chosen_by = x
    if BIASED:
        chosen_by = x + tl.load(correction_bias + expert, mask=known, other=0.0)[None, :]
    key = tl.where(known[None, :], _ordered(chosen_by), _LEAST)
    if TOP_GROUPS < GROUPS:
        key = _in_best_groups(key, GROUPS, GROUP, TOP_GROUPS, BIASED, TOKENS, GROUPS_PADDED, GROUP_PADDED)

    choices = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((TOKENS, CHOICES), tl.int32)
    weight = tl.zeros((TOKENS, CHOICES), tl.float32)
    for choice in range(TOP_K):
        # Of equal keys the first.
        best = tl.argmax(key, 1)[:, None]
        hit = place[None, :] == best
        chosen = tl.where(choices == choice, best // GROUP_PADDED * GROUP + best % GROUP_PADDED, chosen)
        weight = tl.where(choices == choice, tl.sum(tl.where(hit, x, 0.0), 1)[:, None], weight)
        key = tl.where(hit, _LEAST, key)

    if SCORE == "softmax_after":
        weight = _softmax(tl.where(choices < TOP_K, weight, float("-inf")))
    if RENORMALIZE:
        weight = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 1)[:, None] + 1e-20, weight.shape))
    places, inside = token[:, None] * TOP_K + choices, (token < tokens)[:, None] & (choices < TOP_K)
    tl.store(weights + places, weight * scale, mask=inside)
    tl.store(index + places, chosen.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad, logits, index, out, tokens, row_stride, scale,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = logits + token[:, None] * row_stride
    choices = tl.arange(0, CHOICES)[None, :]
    taken = (token < tokens)[:, None] & (choices < TOP_K)
    chosen = tl.load(index + token[:, None] * TOP_K + choices, mask=taken, other=0).to(tl.int32)
    of_weight = tl.load(grad + token[:, None] * TOP_K + choices, mask=taken, other=0.0) * scale
    x = tl.load(row + chosen, mask=taken, other=0.0).to(tl.float32)
    experts = tl.arange(0, PADDED)[None, :]
    known = (token < tokens)[:, None] & (experts < EXPERTS)

    scores = tl.zeros((TOKENS, PADDED), tl.float32)
    if SCORE == "softmax":
        every = tl.load(row + experts, mask=known, other=0.0).to(tl.float32)
        every = tl.where(experts < EXPERTS, every, float("-inf"))
        most = tl.max(every, 1)[:, None]
        raised = _exp(every - most)
        total = tl.sum(raised, 1)[:, None]
        scores = tl.div_rn(raised, tl.broadcast_to(total, raised.shape))
        weight = tl.div_rn(_exp(x - most), tl.broadcast_to(total, x.shape))
    elif SCORE == "softmax_after":
        weight = _softmax(tl.where(choices < TOP_K, x, float("-inf")))
    else:
        weight = _sigmoid(x)
    weight = tl.where(choices < TOP_K, weight, 0.0)
    if RENORMALIZE:
        total_weight = tl.broadcast_to(tl.sum(weight, 1)[:, None] + 1e-20, weight.shape)
        # The weights sum to one whatever the logits are, unless they all but vanish: what their gradients have in
        # common is nothing, and taken away it leaves no rounding error in its place.
        common = tl.sum(tl.where(choices == 0, of_weight, 0.0), 1)[:, None]
        of_weight -= tl.where(taken & (total_weight > 1e-12), common, 0.0)
        share = tl.div_rn(tl.broadcast_to(tl.sum(of_weight * weight, 1)[:, None], weight.shape), total_weight)
        of_weight = tl.div_rn(tl.where(taken, of_weight - share, 0.0), total_weight)

    if SCORE == "sigmoid":
        of_logit = of_weight * (1.0 - weight) * weight
        of_row = tl.zeros((TOKENS, PADDED), tl.float32)
    else:
        pull = tl.sum(of_weight * weight, 1)[:, None]
        if SCORE == "softmax":
            of_logit = of_weight * weight
            of_row = -scores * pull
        else:
            of_logit = (of_weight - pull) * weight
            of_row = tl.zeros((TOKENS, PADDED), tl.float32)
    for choice in range(TOP_K):
        expert = tl.sum(tl.where(choices == choice, chosen, 0), 1)[:, None]
        of_choice = tl.sum(tl.where(choices == choice, of_logit, 0.0), 1)[:, None]
        of_row += tl.where(experts == expert, of_choice, 0.0)
    tl.store(out + token[:, None] * EXPERTS + experts, narrow(of_row, out.dtype.element_ty), mask=known)


@on_its_device
def forward(call: Any) -> tuple[Tensor, Tensor]:
    """Op `moe.top_k_gating`, in float32.

    Of equal scores the lower id comes first, which `torch.topk` does not promise; NaN counts as the highest, as there.

    Args:
        call: the call of the op, of logits in float32, bfloat16 or float16, of MAX_EXPERTS at most, and a correction
            bias in float32.

    Returns:
        Weights `[T, top_k]` float32, and ids `[T, top_k]` int64, the best first.
    """
    logits, bias = inner_contiguous(call.logits), call.correction_bias
    tokens, num_experts = logits.shape
    weights = logits.new_empty(tokens, call.top_k, dtype=torch.float32)
    index = logits.new_empty(tokens, call.top_k, dtype=torch.int64)
    if tokens > 0:
        of_groups = (call.num_groups, call.top_groups)
        launch = _forward_launch(num_experts, call.top_k, call.score, bias is not None, call.renormalize, *of_groups)
        _forward_kernel[(triton.cdiv(tokens, launch["TOKENS"]),)](
            logits, weights if bias is None else bias.contiguous(), weights, index, tokens, logits.stride(0),
            call.scale, **launch,
        )  # fmt: skip
    return weights, index


@on_its_device
def backward(call: Any, saved: tuple[Tensor, Tensor], grad: Tensor, _: None) -> dict[str, Tensor]:
    """The gradient of the logits.

    Args:
        call: the call of `forward`.
        saved: what it gave.
        grad: of the weights; ids have none.
    """
    logits, index = inner_contiguous(call.logits), saved[1]
    tokens, num_experts = logits.shape
    out = logits.new_empty(tokens, num_experts)
    if tokens > 0:
        launch = _backward_launch(num_experts, call.top_k, call.score, call.renormalize)
        _backward_kernel[(triton.cdiv(tokens, launch["TOKENS"]),)](
            grad.contiguous(), logits, index.contiguous(), out, tokens, logits.stride(0), call.scale, **launch
        )
    return {"logits": out}


def _options(padded: int, top_k: int) -> dict[str, Any]:
    return {
        "TOKENS": max(1, _SCORES // padded), "CHOICES": triton.next_power_of_2(top_k),
        "num_warps": 1, "enable_fp_fusion": True,
    }  # fmt: skip


def _forward_launch(
    num_experts: int, top_k: int, score: str, biased: bool, renormalize: bool, num_groups: int, top_groups: int
) -> dict[str, Any]:
    if top_groups == num_groups:
        num_groups = top_groups = 1
    group = num_experts // num_groups
    groups_padded, group_padded = triton.next_power_of_2(num_groups), triton.next_power_of_2(group)
    return {
        "SCORE": score, "BIASED": biased, "RENORMALIZE": renormalize, "TOP_K": top_k,
        "GROUPS": num_groups, "GROUP": group, "TOP_GROUPS": top_groups,
        "GROUPS_PADDED": groups_padded, "GROUP_PADDED": group_padded,
        **_options(groups_padded * group_padded, top_k),
    }  # fmt: skip


def _backward_launch(num_experts: int, top_k: int, score: str, renormalize: bool) -> dict[str, Any]:
    padded = triton.next_power_of_2(num_experts)
    return {
        "SCORE": score, "RENORMALIZE": renormalize, "TOP_K": top_k, "EXPERTS": num_experts, "PADDED": padded,
        **_options(padded, top_k),
    }  # fmt: skip


#: Experts, top_k, score, biased, renormalize, groups, top groups.
_GATINGS = {
    "mixtral-8x7b": (8, 2, "softmax", False, True, 1, 1),
    "qwen3-30b-a3b": (128, 8, "softmax", False, True, 1, 1),
    "olmoe-1b-7b": (64, 8, "softmax", False, False, 1, 1),
    "gpt-oss-120b": (128, 4, "softmax_after", False, False, 1, 1),
    "llama-4-maverick": (128, 1, "sigmoid", False, False, 1, 1),
    "deepseek-v2": (160, 6, "softmax", False, False, 8, 3),
    "deepseek-v3": (256, 8, "sigmoid", True, True, 8, 4),
    "kimi-k2": (384, 8, "sigmoid", True, True, 1, 1),
    "1024 experts in groups": (1024, 32, "softmax", True, True, 32, 8),
    "1023 experts": (1023, 16, "softmax", True, True, 1, 1),
}
#: What the dtype of the logits may change is seen with these.
_FEW = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def _forward_launches(names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    return {name: _forward_launch(*_GATINGS[name]) for name in names}


def _backward_launches(names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    return {name: _backward_launch(*_GATINGS[name][:3], _GATINGS[name][4]) for name in names}


def _programs(dtype: str, names: Iterable[str]) -> tuple[Program, Program]:
    numbers = {"tokens": "i32", "row_stride": "i32", "scale": "fp32"}
    pointers = {"logits": f"*{dtype}:16", "index": "*i64:16"}
    forward = {"correction_bias": "*fp32:16", "weights": "*fp32:16", **pointers, **numbers}
    backward = {"grad": "*fp32:16", "out": f"*{dtype}:16", **pointers, **numbers}
    return (
        Program(f"forward {dtype}", _forward_kernel, forward, NO_SPILLS, lambda chip: _forward_launches(names)),
        Program(f"backward {dtype}", _backward_kernel, backward, NO_SPILLS, lambda chip: _backward_launches(names)),
    )


#: What is compiled ahead of time.
AOT = (*_programs("fp32", _GATINGS), *_programs("bf16", _FEW), *_programs("fp16", _FEW))
