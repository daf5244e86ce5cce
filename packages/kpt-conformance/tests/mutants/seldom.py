"""Faults that show seldom: in float64, where three options meet, past sixteen or thirty-two bits, in square blocks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kpt_core

from .mutant import Mutant

MUTANTS: list[Mutant] = []


def fault(op: str, name: str, at: Callable[[Any], bool]) -> Callable[[Callable[[Any, Any], Any]], None]:
    """Enter a mutant: the decorated function is given what the reference computes, and a call. `values` must find it.

    `at` is asked of a trial.
    """

    def enter(body: Callable[[Any, Any], Any]) -> None:
        right = kpt_core.get_op(op).run_reference
        make = lambda: (lambda call: body(right, call),)  # noqa: E731
        MUTANTS.append(Mutant(name, op, "values", make, {"differentiable": True}, at))

    return enter


def in_float64(trial: Any) -> bool:
    return trial.dtype is torch.float64 and not trial.case.drawn


def having(**wanted: Any) -> Callable[[Any], bool]:
    """Trials of cases with these sizes and options."""
    return lambda trial: all(trial.case.sizes.get(name) == value for name, value in wanted.items())


def many(trial: Any) -> bool:
    return any(isinstance(size, int) and size > 2**15 for size in trial.case.sizes.values())


# Float64, which is what the oracle computes in.


def _wide_scales(trial: Any) -> bool:
    return trial.dtype is trial.case.sizes.get("scale_dtype") is torch.float64


def _single(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().to(tensor.dtype)


@fault("moe.experts", "float64 passes through float32 at the activation's input", in_float64)
def _(right, call):
    return right(call._replace(x=_single(call.x)))


@fault("moe.experts", "routing weights of float64 pass through float32", in_float64)
def _(right, call):
    return right(call._replace(top_k_weights=_single(call.top_k_weights)))


@fault("moe.grouped_mm", "float64 is multiplied in float32", in_float64)
def _(right, call):
    if call.x.dtype is not torch.float64:
        return right(call)
    return right(call._replace(x=call.x.float(), weight=call.weight.float())).double()


@fault("moe.grouped_mm_wgrad", "float64 is summed in float32", in_float64)
def _(right, call):
    if call.x.dtype is not torch.float64:
        return right(call)
    return right(call._replace(x=call.x.float(), grad=call.grad.float())).double()


@fault("moe.scaled_grouped_mm", "scales of float64 pass through float32 where the sum is in float64", _wide_scales)
def _(right, call):
    return right(call._replace(scale=_single(call.scale)))


@fault("moe.top_k_gating", "logits of float64 are scored in float32", in_float64)
def _(right, call):
    if call.logits.dtype is not torch.float64:
        return right(call)
    weights, index = right(call._replace(logits=call.logits.float()))
    return weights.double(), index


# Blocks, as many in either direction: no shape tells which is which.


def _turned(scale: Tensor | None) -> Tensor | None:
    square = scale is not None and scale.dim() == 3 and scale.shape[1] == scale.shape[2] > 1
    return scale.mT if square else scale


@fault(
    "moe.scaled_grouped_mm",
    "the scales of square blocks are read the other way round for matrices stored as NK",
    lambda trial: "square" in trial.case.name,
)
def _(right, call):
    stored = call.weight.stride(1) < call.weight.stride(2)
    return right(call._replace(scale=_turned(call.scale)) if stored else call)


@fault(
    "moe.experts",
    "the scales of square blocks of the down projection are read the other way round",
    lambda trial: "8-bit" in trial.case.name,
)
def _(right, call):
    return right(call._replace(down_scale=_turned(call.down_scale)))


@fault(
    "moe.experts",
    "the scales of square blocks of transposed matrices are read the other way round",
    lambda trial: "8-bit, transposed" in trial.case.name,
)
def _(right, call):
    return right(call._replace(gate_up_scale=_turned(call.gate_up_scale)) if call.transposed else call)


# Widths that no power of two is, and second tiles of two dimensions at once.


def wide(trial: Any) -> bool:
    return any(type(size) is int and 1024 < size < 2**15 for size in trial.case.sizes.values())


def tiles(*names: str) -> Callable[[Any], bool]:
    """Trials of drawn cases in which these sizes are past a tile of 128."""
    return lambda trial: trial.case.drawn and all(trial.case.sizes.get(name, 0) > 128 for name in names)


@fault("moe.grouped_mm", "columns past 2,048 repeat the first", wide)
def _(right, call):
    out = right(call).clone()
    rest = max(out.shape[1] - 2048, 0)
    return torch.cat((out[:, :2048], out[:, :rest]), 1)


@fault("moe.grouped_mm", "what is past 4,096 of K is not summed", wide)
def _(right, call):
    return right(call._replace(x=call.x[:, :4096], weight=call.weight[:, :4096]))


@fault("moe.grouped_mm", "past 2,048 of K sums are kept in the dtype", lambda t: wide(t) and t.dtype is torch.bfloat16)
def _(right, call):
    if call.x.shape[1] <= 2048:
        return right(call)
    parts = zip(call.x.split(64, 1), call.weight.split(64, 1), strict=True)
    return sum(right(call._replace(x=x, weight=weight)) for x, weight in parts)


@fault("moe.grouped_mm", "a second tile of rows has no second tile of columns", tiles("rows", "columns"))
def _(right, call):
    out = right(call).clone()
    out[128:, 128:] = 0
    return out


@fault(
    "moe.scaled_grouped_mm",
    "of a tile of 127 columns the last is left out",
    lambda trial: trial.case.sizes.get("columns", 0) % 128 == 127,
)
def _(right, call):
    out = right(call).clone()
    if out.shape[1] % 128 == 127:
        out[:, -1] = 0
    return out


@fault("moe.experts", "few tokens of a wide hidden size lose what fills no tile of 128", wide)
def _(right, call):
    x = call.x.clone() if x_is_wide(call) else call.x
    if x_is_wide(call):
        x[:, x.shape[1] // 128 * 128 :] = 0
    return right(call._replace(x=x))


def x_is_wide(call: Any) -> bool:
    return call.x.shape[1] > 1024 and len(call.x) < 128


# Values of options that lie beside those that are usual.


@fault("moe.experts", "any alpha but one is 1.702", having(alpha=1.5))
def _(right, call):
    return right(call._replace(alpha=call.alpha if call.alpha == 1 else 1.702))


@fault("moe.experts", "limits past one are not applied", having(limit=7.0))
def _(right, call):
    return right(call._replace(limit=None if call.limit is None or call.limit > 1 else call.limit))


@fault("moe.top_k_gating", "a scale of less than nothing counts as one", having(scale=-1.5))
def _(right, call):
    return right(call._replace(scale=call.scale if call.scale >= 0 else 1.0))


@fault("moe.top_k_gating", "a scale of zero is taken for none", having(scale=0.0))
def _(right, call):
    return right(call._replace(scale=call.scale or 1.0))


# Three options at once.


@fault(
    "moe.experts",
    "with relu2 and no bias of the up projection, that of the down projection is left out of transposed matrices",
    having(activation="relu2", biases=("down",), transposed=True),
)
def _(right, call):
    lone = call.gate_up_proj_bias is None and call.activation == "relu2" and call.transposed
    return right(call._replace(down_proj_bias=None) if lone else call)


@fault(
    "moe.experts",
    "gelu of transposed matrices of blocks is the tanh approximation",
    having(activation="gelu", up_scheme="128x128", transposed=True),
)
def _(right, call):
    blocks = call.gate_up_scale is not None and call.gate_up_scale.dim() == 3
    gelu = blocks and call.transposed and call.activation == "gelu"
    return right(call._replace(activation="gelu_tanh") if gelu else call)


@fault(
    "moe.experts",
    "the limit is not applied to quantised rows where every expert is chosen",
    having(top_k="every", up_scheme="row", limit=0.7),
)
def _(right, call):
    every = call.top_k_index.shape[1] == call.gate_up_proj.shape[0]
    rows = call.gate_up_scale is not None and call.gate_up_scale.dim() == 2
    return right(call._replace(limit=None) if every and rows and len(call.x) > 1 else call)


# Beyond what sixteen bits count, and thirty-two.


@fault("moe.experts", "tokens past 32767 are counted in sixteen bits", many)
def _(right, call):
    kept = torch.arange(len(call.x)).unsqueeze(1) <= 32767
    return right(call._replace(top_k_index=torch.where(kept, call.top_k_index, -1)))


@fault("moe.grouped_mm", "ends past 32767 are cut to sixteen bits", many)
def _(right, call):
    return right(call._replace(offsets=call.offsets.clamp(max=32767)))


@fault("moe.grouped_mm_wgrad", "the grid ends after 65535 rows", many)
def _(right, call):
    return right(call._replace(offsets=call.offsets.clamp(max=65535)))


@fault("moe.scaled_grouped_mm", "the grid ends after 65535 rows", many)
def _(right, call):
    return right(call._replace(offsets=call.offsets.clamp(max=65535)))


@fault("moe.top_k_gating", "tokens past 65535 have the experts of the first", many)
def _(right, call):
    weights, index = right(call)
    late = torch.arange(len(weights)).unsqueeze(1) > 65535
    return torch.where(late, weights[:1], weights), torch.where(late, index[:1], index)


@fault("moe.experts", "ids are cut to thirty-two bits", having(load="far"))
def _(right, call):
    return right(call._replace(top_k_index=call.top_k_index.to(torch.int32)))


@fault("moe.experts", "ids past thirty-two bits are clamped to the last expert", having(load="far"))
def _(right, call):
    last = call.gate_up_proj.shape[0] - 1
    return right(call._replace(top_k_index=torch.where(call.top_k_index.long() > 2**31, last, call.top_k_index)))


@fault("moe.experts", "pairs of a negative routing weight are taken for none", lambda trial: "small" in trial.case.name)
def _(right, call):
    return right(call._replace(top_k_weights=torch.where(call.top_k_weights < 0, 0, call.top_k_weights)))
