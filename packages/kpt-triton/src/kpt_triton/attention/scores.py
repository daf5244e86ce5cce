"""Share what kernels of attention have in common: the tangent of scores, and how what changes them is handed over."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.chips import family_of
from kpt_triton.numeric import dot, narrow

from .mask import allowed

#: The least number of float32: what is subtracted from scores in rows that see nothing.
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: What calls may have beside queries, keys and values, in both directions; and usual ones, which are compiled ahead.
PLAIN: dict[str, Any] = {
    "SLOPES": False, "BIAS": False, "CAPPED": False, "CAUSAL": False, "INTERVALS": 0, "BITS": False
}  # fmt: skip
USUAL: dict[str, dict[str, Any]] = {
    "causal": {"CAUSAL": True},
    "documents": {"CAUSAL": True, "INTERVALS": 1},
    "bits": {"BITS": True},
    "everything": {name: 2 if name == "INTERVALS" else True for name in PLAIN},
}
#: Keys of a step where keys are split over programs.
_LEAST_KEYS, _MOST_KEYS = 16, 64
#: Bytes of a step's keys, steps that are under way, and warps, by a chip's family; the last for NVIDIA's.
_STEPS = {"gfx9": (16384, 2, 4), "gfx11": (4096, 1, 8), "xe": (16384, 2, 8)}
_USUAL_STEP = (16384, 3, 4)


@triton.jit
def tanh(x):
    """The hyperbolic tangent in float32, small arguments' too (Cephes' polynomial)."""
    size = tl.abs(x)
    square = x * x
    small = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    small = x + x * square * ((small + 1.33314422036e-1) * square - 3.33332819422e-1)
    large = 1.0 - 2.0 / (tl.exp(2 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def modified(
    products, row, key, readable, position, scale, cap, slope, bias, stride_bm, stride_bn,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores in units of log 2 of products of queries and keys, and what their gradients are less by, the cap's slope.

    `row`, `key` and `readable` (where a bias has numbers) broadcast to the products. These times `scale` are scores in
    those units or, CAPPED, arguments of the tangent.
    """
    scores = products * scale
    steep = 1.0
    if CAPPED:
        scores = tanh(scores)
        steep = 1.0 - scores * scores
        scores = scores * cap
    if SLOPES:
        scores -= slope * tl.abs(key - (row + position)).to(tl.float32)
    if BIAS:
        at = bias + row.to(tl.int64) * stride_bm + key.to(tl.int64) * stride_bn
        scores += tl.load(at, mask=readable, other=0.0).to(tl.float32) * LOG2E
    return scores, steep


@triton.jit
def with_tile(
    acc, total, top, rows, k, v, stride_kn, stride_kd, stride_vn, stride_vd, start, row, inside, queries, keys,
    position, scale, cap, slope, bias, stride_bm, stride_bn, intervals, table, bits,
    DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, INTERVALS: tl.constexpr, BITS: tl.constexpr, CAPPED: tl.constexpr,
    SLOPES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys brings; `top` and scores are in units of log 2.

    `slope` and what is pointed to are one for all rows or, as few queries of several heads have them, one for each.
    """
    key = start + tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    values = tl.arange(0, VALUES)
    at_k = k + key.to(tl.int64)[:, None] * stride_kn + dims[None, :] * stride_kd
    at_v = v + key.to(tl.int64)[:, None] * stride_vn + values[None, :] * stride_vd
    if MASKED:
        seen = allowed(row, inside, start, keys, position, intervals, table, bits, KEYS, CAUSAL, INTERVALS, BITS, False)
        # What no row sees has no influence, NaN neither.
        some = tl.max(seen.to(tl.int32), 0) > 0
        k_tile = tl.load(at_k, mask=some[:, None] & (dims < DIM)[None, :], other=0.0)
        v_tile = tl.load(at_v, mask=some[:, None] & (values < VALUE_DIM)[None, :], other=0.0)
    elif DIM == DIMS and VALUE_DIM == VALUES:
        k_tile = tl.load(at_k)
        v_tile = tl.load(at_v)
    else:
        k_tile = tl.load(at_k, mask=(dims < DIM)[None, :], other=0.0)
        v_tile = tl.load(at_v, mask=(values < VALUE_DIM)[None, :], other=0.0)
    scores, _ = modified(
        dot(rows, k_tile.T, tl.zeros((rows.shape[0], KEYS), tl.float32), "ieee"), row[:, None], key[None, :],
        inside[:, None] & (key < keys)[None, :], position, scale, cap, slope, bias, stride_bm, stride_bn,
        CAPPED, SLOPES, BIAS,
    )  # fmt: skip
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.maximum(higher, LOWEST)
    weights = tl.exp2(scores - base[:, None])
    fading = tl.exp2(top - base)
    total = total * fading + tl.sum(weights, 1)
    acc = dot(narrow(weights, v_tile.dtype), v_tile, acc * fading[:, None], "ieee")
    return acc, total, higher


def single(tensor: Tensor) -> Tensor:
    """Return a tensor of which nothing is in float64, which some of Intel's GPUs lack."""
    return tensor.detach().float() if tensor.dtype is torch.float64 else tensor.detach()


def numbers(tensor: Tensor | None) -> Tensor | None:
    """Return numbers of heads, one beside the other."""
    return None if tensor is None else single(tensor).contiguous()


def scales_of(call: Any) -> tuple[float, float, float]:
    """Return a call's scale; by what kernels multiply products; and its cap in units of log 2, 0 for none."""
    scale = call.q.shape[3] ** -0.5 if call.scale is None else float(call.scale)
    cap = float(call.softcap)
    return scale, scale / cap if cap else scale * LOG2E.value, cap * LOG2E.value


def bias_of(call: Any) -> Tensor | None:
    """Return the bias of each score."""
    shape = (*call.q.shape[:3], call.k.shape[2])
    return None if call.bias is None else single(call.bias).expand(shape)


def options_of(call: Any) -> dict[str, Any]:
    """Return by what kernels of a call are told apart, but for sizes."""
    return {
        "SLOPES": call.alibi_slopes is not None, "BIAS": call.bias is not None, "CAPPED": call.softcap > 0,
        "CAUSAL": bool(call.causal), "BITS": call.blocks is not None,
        "INTERVALS": 0 if call.intervals is None else call.intervals.shape[3],
    }  # fmt: skip


def narrow_family_of(chip: str) -> str:
    """Return the family of a chip as tiles of attention have it: RDNA 4 apart from RDNA 3."""
    return "gfx12" if chip.startswith("gfx12") else family_of(chip)


def step_of(chip: str, itemsize: int, dims: int) -> tuple[int, int, int]:
    """Return keys of a step, steps under way, and warps, where keys are split over programs; heads have `dims`."""
    size, stages, warps = _STEPS.get(family_of(chip), _USUAL_STEP)
    return min(max(size // (dims * itemsize), _LEAST_KEYS), _MOST_KEYS), stages, warps


def padded(dim: int, value_dim: int) -> dict[str, int]:
    """Return the sizes of heads, and what they are padded to."""
    dims, values = (max(16, triton.next_power_of_2(each)) for each in (dim, value_dim))
    return {"DIM": dim, "DIMS": dims, "VALUE_DIM": value_dim, "VALUES": values}
