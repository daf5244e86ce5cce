"""The heart of the experts' backward: the gradient behind the down projection, and what the activation makes of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.launching import inner_contiguous, precision, programs
from kpt_triton.numeric import narrow
from kpt_triton.tile import Tile

from .activation import activate, activate_backward
from .experts_forward import Gating
from .launching import check_scales, most_tiles, padded, scales_of, weight_descriptor
from .mainloop import accumulate, last_tiles, place_of, rows_of

#: Numbers of the product that a thread works on at a time, unless a part would be too narrow then.
_AT_A_TIME = 8
#: Columns of h in the narrowest part: with 16 a row has 32 bytes of 16-bit numbers, which only few registers are worth.
_NARROWEST, _NARROWEST_OF_FEW = 32, 16


def parts_of(tile: Tile, interleaved: bool) -> int:
    """Return into how many parts the columns of a tile are cut for what follows the product: 1, 2, 4 or 8."""
    # Where gate and up alternate, a column of the product has two of h.
    numbers = tile.m * tile.n * (2 if interleaved else 1)
    wanted = min(8, numbers // (32 * tile.warps * _AT_A_TIME))
    narrowest = _NARROWEST_OF_FEW if tile.registers or interleaved else _NARROWEST
    return max(1, min(wanted, tile.n // narrowest))


@triton.jit
def _halves(x):
    """The first and the last columns of `[rows, columns]`; no number leaves its thread where warps share rows alone."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _part_of(x, PART: tl.constexpr, PARTS: tl.constexpr):
    """Columns of `[rows, columns]`: part number PART of PARTS, which is 1, 2, 4 or 8."""
    if PARTS == 1:
        return x
    else:
        first, last = _halves(x)
        half = first if PART < PARTS // 2 else last
        if PARTS >= 4:
            first, last = _halves(half)
            half = first if PART % (PARTS // 2) < PARTS // 4 else last
        if PARTS >= 8:
            first, last = _halves(half)
            half = first if PART % 2 == 0 else last
        return half


@triton.jit(do_not_specialize=["rows", "stride_dn"])
def slope_kernel(
    grad, w, h, grad_h, weighted, dots, offsets, order, weights, bias, scale,
    rows, N, K, width, experts, top_k, alpha, beta, limit,
    stride_gr, stride_we, stride_wk, stride_wn, stride_hr, stride_ar, stride_dn, stride_be,
    stride_se, stride_sk, stride_sn,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, NAME: tl.constexpr, IS_GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr, BIAS: tl.constexpr, NEED_H: tl.constexpr, NEED_WEIGHTED: tl.constexpr,
    NEED_DOTS: tl.constexpr, SCALE: tl.constexpr, LAYOUT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients behind the down projection, as needed.

    With `d = grad[order[r] // top_k] @ w[e]`, `a` the activation of h and s the routing weight of r: `grad_h[r]` is the
    gradient of h given `s d`; `weighted[r] = s a`; and `dots[tile of columns, r]` the part of `<d, a>`, which is the
    gradient of s (SonicMoE, arXiv:2512.14080), that its columns give. PARTS: see `parts_of`.
    """
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    SPAN: tl.constexpr = 2 * WIDTH if INTERLEAVED else WIDTH
    last = last_tiles(offsets, rows, experts, EXPERTS, BLOCK_M, False)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.max(last, 0) * tiles_n, tl.num_programs(0)):
        expert, tile_m, tile_n, before = place_of(tile, last, tiles_n, GROUP)
        first, end = rows_of(tile_m, before, offsets, expert, rows, experts, BLOCK_M)
        row = first + tl.arange(0, BLOCK_M)
        taken = row < end
        pair = tl.load(order + tl.where(taken, row, first))
        column = tile_n * BLOCK_N
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < N
        acc, _ = accumulate(
            grad, (pair // top_k).to(tl.int64), stride_gr, first, w, expert, stride_we, stride_wk, stride_wn,
            scale, stride_se, stride_sk, stride_sn, scale, 0, column, column, inside, N, K, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, False, False, LAYOUT, SCALE, False, PRECISION, False, "",
        )  # fmt: skip
        weight = tl.load(weights + pair).to(tl.float32)[:, None]
        total = tl.zeros((BLOCK_M,), tl.float32)
        # Part by part, so that the values of h and what follows from them have registers for one part's columns alone.
        for part in tl.static_range(PARTS):
            columns = column + part * WIDTH + tl.arange(0, WIDTH)
            inside = columns < N
            product = _part_of(acc, part, PARTS)
            if SCALE == "n":
                scales = scale + expert.to(tl.int64) * stride_se + columns * stride_sn
                product *= tl.load(scales, mask=inside, other=0.0)[None, :]
            spans = tile_n * PARTS * SPAN + part * SPAN + tl.arange(0, SPAN)
            span_inside = spans < (width if INTERLEAVED else N)
            span_mask = taken[:, None] & span_inside[None, :]
            of_h = row.to(tl.int64)[:, None] * stride_hr + spans[None, :]
            gate = tl.load(h + of_h, mask=span_mask, other=0.0).to(tl.float32)
            up = gate
            if IS_GATED and not INTERLEAVED:
                up = tl.load(h + of_h + N, mask=span_mask, other=0.0).to(tl.float32)
            if BIAS:
                biases = bias + expert.to(tl.int64) * stride_be + spans
                gate += tl.load(biases, mask=span_inside, other=0.0).to(tl.float32)[None, :]
                if IS_GATED and not INTERLEAVED:
                    up += tl.load(biases + N, mask=span_inside, other=0.0).to(tl.float32)[None, :]
            if INTERLEAVED:
                gate, up = tl.split(tl.reshape(gate, (BLOCK_M, WIDTH, 2)))
            mask = taken[:, None] & inside[None, :]
            if NEED_DOTS or NEED_WEIGHTED:
                value = activate(gate, up, alpha, beta, limit, NAME, IS_GATED, LIMITED)
                if NEED_DOTS:
                    total += tl.sum(tl.where(mask, product * value, 0.0), 1)
                    if part == PARTS - 1:
                        tl.store(dots + tile_n.to(tl.int64) * stride_dn + row, total, mask=taken)
                if NEED_WEIGHTED:
                    places = weighted + row.to(tl.int64)[:, None] * stride_ar + columns[None, :]
                    tl.store(places, narrow(value * weight, weighted.dtype.element_ty), mask=mask)
            if NEED_H:
                grad_gate, grad_up = activate_backward(
                    product * weight, gate, up, alpha, beta, limit, NAME, IS_GATED, LIMITED
                )
                if INTERLEAVED:
                    both = tl.reshape(tl.join(grad_gate, grad_up), (BLOCK_M, SPAN))
                    tl.store(grad_h + of_h, narrow(both, grad_h.dtype.element_ty), mask=span_mask)
                else:
                    tl.store(grad_h + of_h, narrow(grad_gate, grad_h.dtype.element_ty), mask=span_mask)
                    if IS_GATED:
                        tl.store(grad_h + of_h + N, narrow(grad_up, grad_h.dtype.element_ty), mask=span_mask)


def multiply_and_differentiate(
    grad: Tensor,
    weight: Tensor,
    h: Tensor,
    top_k_weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    act: Gating,
    tile: Tile,
    *,
    need_h: bool,
    need_weighted: bool,
    need_dots: bool,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel.

    Args:
        grad: `[tokens, K]`, the gradient of the experts' output.
        weight: `[experts, K, N]`, the down projections transposed, any strides.
        h: `[rows, width]`, the pre-activation without bias, contiguous.
        top_k_weights: `[tokens, top_k]`, contiguous.
        order: `[rows]` int32, the pair of each sorted row.
        offsets: `[experts]` int32.
        act: the activation.
        tile: the configuration.
        need_h: whether the gradient of h is wanted.
        need_weighted: whether the weighted activation is.
        need_dots: whether the gradient of the routing weights is.
        bias: `[experts, width]` of the pre-activation.
        scale: float32 `[experts, a, b]`, scales of 8-bit weights, of K or blocks.

    Returns:
        The gradient of h `[rows, width]`, the weighted activation `[rows, N]`, both of grad's dtype, and the gradient
        of each row's routing weight `[rows]` in float32; empty what is not needed. Rows of no expert are left as they
        are.
    """
    kind = scales_of(scale, weight)
    check_scales(kind, tile)
    grad = inner_contiguous(grad)
    experts, inner, columns = weight.shape
    rows, width = h.shape
    tiles_n = triton.cdiv(columns, tile.n)
    grad_h = grad.new_empty(rows if need_h else 0, width)
    weighted = grad.new_empty(rows if need_weighted else 0, columns)
    dots = grad.new_empty(tiles_n if need_dots else 0, rows, dtype=torch.float32)
    if rows == 0 or columns == 0 or not (need_h or need_weighted or need_dots):
        return grad_h, weighted, dots.sum(0)
    matrices, layout = weight_descriptor(weight, tile, tile.n)
    strides = (0, 0, 0) if scale is None else scale.stride()
    tiles = most_tiles(rows, experts, tile.m) * tiles_n
    slope_kernel[(programs(grad.device, tiles, tile.warps),)](
        grad, matrices, h, grad_h if need_h else h, weighted if need_weighted else h, dots if need_dots else h,
        offsets, order, top_k_weights, bias if bias is not None else h, scale if scale is not None else h,
        rows, columns, inner, width, experts, top_k_weights.shape[1], *act.numbers(),
        grad.stride(0), *weight.stride(), width, columns, rows, 0 if bias is None else bias.stride(0), *strides,
        EXPERTS=padded(experts), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
        EVEN_K=inner % tile.k == 0, EVEN_N=columns % tile.n == 0, **act.constants(), BIAS=bias is not None,
        NEED_H=need_h, NEED_WEIGHTED=need_weighted, NEED_DOTS=need_dots, SCALE=kind, LAYOUT=layout,
        PRECISION=precision(grad), PARTS=parts_of(tile, act.interleaved), **tile.options(),
    )  # fmt: skip
    return grad_h, weighted, dots.sum(0)
