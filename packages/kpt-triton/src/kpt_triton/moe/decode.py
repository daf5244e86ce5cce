"""The experts for a few tokens, where nothing but reading weights takes time: no sorting, and no product of tiles.

Each pair of token and expert is computed by itself: its weights are read once, spread over as many programs as keep the
memory busy. Two launches, both with a grid that follows from shapes alone.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.launching import inner_contiguous
from kpt_triton.numeric import narrow, widen

from .activation import activate
from .experts_forward import Gating
from .launching import scales_of
from .mainloop import SCALE_BLOCK


@dataclass(frozen=True, slots=True)
class Strip:
    """How the weights of a pair are read.

    Attributes:
        n: columns of a program.
        k: weights of a column that are read at a time; at most 128 where scales are of blocks.
        warps: of a program.
        stages: reads that are under way at the same time.
    """

    n: int = 8
    k: int = 256
    warps: int = 4
    stages: int = 4


_STRIP = Strip()


@triton.jit
def _weights(
    w, scale, n, first, stride_wn, stride_wk, stride_sn, stride_sk, inside, K,
    BLOCK_K: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """`[n, BLOCK_K]` weights from row `first` of K in float32, with their scales if those are of blocks."""
    k = first + tl.arange(0, BLOCK_K)
    places = n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk
    found = widen(tl.load(w + places, mask=inside[:, None] & (k < K)[None, :], other=0.0), tl.float32)
    if SCALE == "block":
        # All of K that is read here lies in one block: a scale for each column, not one for each weight.
        of_block = n // SCALE_BLOCK * stride_sn + first // SCALE_BLOCK * stride_sk
        found *= tl.load(scale + of_block, mask=inside, other=0.0)[:, None]
    return found


@triton.jit
def decode_up_kernel(
    x, index, w, bias, scale, out, N, K, experts, top_k, alpha, beta, limit, stride_xr, stride_we, stride_wk, stride_wn,
    stride_or, stride_be, stride_se, stride_sk, stride_sn,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, NAME: tl.constexpr, IS_GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The activation of one pair; nothing where it has no expert here."""
    pair = tl.program_id(0)
    expert = tl.load(index + pair)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    if (expert >= 0) & (expert < experts):
        matrix = w + expert.to(tl.int64) * stride_we
        scales = scale + expert.to(tl.int64) * stride_se
        token = x + (pair // top_k).to(tl.int64) * stride_xr
        gate_n = 2 * n if INTERLEAVED else n
        up_n = 2 * n + 1 if INTERLEAVED else n + N
        gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        ups = gates
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)
            value = tl.load(token + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
            gates += value * _weights(
                matrix, scales, gate_n, first, stride_wn, stride_wk, stride_sn, stride_sk, inside, K, BLOCK_K, SCALE
            )
            if IS_GATED:
                ups += value * _weights(
                    matrix, scales, up_n, first, stride_wn, stride_wk, stride_sn, stride_sk, inside, K, BLOCK_K, SCALE
                )
        gate = tl.sum(gates, 1)
        up = tl.sum(ups, 1)
        if SCALE == "n":
            gate *= tl.load(scales + gate_n * stride_sn, mask=inside, other=0.0)
            if IS_GATED:
                up *= tl.load(scales + up_n * stride_sn, mask=inside, other=0.0)
        if BIAS:
            biases = bias + expert.to(tl.int64) * stride_be
            gate += tl.load(biases + gate_n, mask=inside, other=0.0).to(tl.float32)
            if IS_GATED:
                up += tl.load(biases + up_n, mask=inside, other=0.0).to(tl.float32)
        result = activate(gate, up, alpha, beta, limit, NAME, IS_GATED, LIMITED)
        tl.store(out + pair.to(tl.int64) * stride_or + n, narrow(result, out.dtype.element_ty), mask=inside)


@triton.jit
def decode_down_kernel(
    a, index, weights, w, bias, scale, out, N, K, experts, top_k, stride_ar, stride_we, stride_wk, stride_wn,
    stride_or, stride_be, stride_se, stride_sk, stride_sn,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one token's pairs."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    added = tl.zeros((BLOCK_N,), tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    # One loop over choices and steps, so that the reads of one choice begin while another one's go on.
    for step in tl.range(0, top_k * steps, num_stages=STAGES):
        pair = token * top_k + step // steps
        expert = tl.load(index + pair)
        here = (expert >= 0) & (expert < experts)
        # Nothing is inside where there is no expert.
        inside_k = tl.where(here, K, 0)
        inside_n = n < tl.where(here, N, 0)
        expert = tl.where(here, expert, 0).to(tl.int64)
        first = step % steps * BLOCK_K
        k = first + tl.arange(0, BLOCK_K)
        value = tl.load(a + pair.to(tl.int64) * stride_ar + k, mask=k < inside_k, other=0.0).to(tl.float32)
        weight = tl.where(here, tl.load(weights + pair).to(tl.float32), 0.0)
        matrix = w + expert * stride_we
        scales = scale + expert * stride_se
        part = _weights(
            matrix, scales, n, first, stride_wn, stride_wk, stride_sn, stride_sk, inside_n, K, BLOCK_K, SCALE
        )
        if SCALE == "n":
            part *= tl.load(scales + n * stride_sn, mask=inside_n, other=0.0)[:, None]
        total += part * (value * weight)[None, :]
        if BIAS:
            once = n < tl.where(here & (first == 0), N, 0)
            added += tl.load(bias + expert * stride_be + n, mask=once, other=0.0).to(tl.float32) * weight
    result = tl.sum(total, 1) + added
    tl.store(out + token.to(tl.int64) * stride_or + n, narrow(result, out.dtype.element_ty), mask=inside)


def decode(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    act: Gating,
    strip: Strip = _STRIP,
) -> Tensor:
    """The experts' output `[tokens, hidden_size]`; arguments as `multiply` has them, without sorting.

    Args:
        x: `[tokens, hidden_size]`.
        top_k_index: `[tokens, top_k]`, contiguous.
        top_k_weights: `[tokens, top_k]`, contiguous.
        up: `[experts, hidden_size, width]`.
        down: `[experts, inner, hidden_size]`.
        up_bias: `[experts, width]`, its last dimension contiguous.
        down_bias: `[experts, hidden_size]`, likewise.
        up_scale: float32 `[experts, a, b]`, scales of 8-bit weights, of columns or blocks.
        down_scale: likewise.
        act: the activation.
        strip: the configuration; of its k no more than a block is read at a time where scales are of blocks.
    """
    of_up, of_down = scales_of(up_scale, up), scales_of(down_scale, down)
    block_k = min(strip.k, SCALE_BLOCK.value) if "block" in (of_up, of_down) else strip.k
    x = inner_contiguous(x)
    tokens, top_k = top_k_index.shape
    experts, inner, hidden = down.shape
    activated = x.new_empty(tokens * top_k, inner)
    out = x.new_empty(tokens, hidden)
    options = {"num_warps": strip.warps, "enable_fp_fusion": True}
    if activated.numel() > 0:
        strides = (0, 0, 0) if up_scale is None else up_scale.stride()
        decode_up_kernel[(tokens * top_k, triton.cdiv(inner, strip.n))](
            x, top_k_index, up, up_bias if up_bias is not None else out, up_scale if up_scale is not None else out,
            activated, inner, x.shape[1], experts, top_k, *act.numbers(), x.stride(0), *up.stride(), inner,
            0 if up_bias is None else up_bias.stride(0), *strides,
            BLOCK_N=strip.n, BLOCK_K=block_k, STAGES=strip.stages, **act.constants(), BIAS=up_bias is not None,
            SCALE=of_up, **options,
        )  # fmt: skip
    if out.numel() > 0:
        strides = (0, 0, 0) if down_scale is None else down_scale.stride()
        decode_down_kernel[(tokens, triton.cdiv(hidden, strip.n))](
            activated, top_k_index, top_k_weights, down, down_bias if down_bias is not None else out,
            down_scale if down_scale is not None else out, out, hidden, inner, experts, top_k, inner, *down.stride(),
            hidden, 0 if down_bias is None else down_bias.stride(0), *strides,
            BLOCK_N=strip.n, BLOCK_K=block_k, STAGES=strip.stages, BIAS=down_bias is not None, SCALE=of_down, **options,
        )  # fmt: skip
    return out
