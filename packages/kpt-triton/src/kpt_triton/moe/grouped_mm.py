"""The grouped matrix product: `out[r] = x[r] @ weight[e]` for the rows `r` of expert `e`."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.chips import chip_of
from kpt_triton.launching import as_read, inner_contiguous, on_its_device, precision, programs, rows_descriptor
from kpt_triton.numeric import narrow
from kpt_triton.tile import Tile

from .launching import check_scales, codes_of, most_tiles, padded, scales_of, weight_descriptor
from .mainloop import accumulate, last_tiles, place_of, rows_of
from .tiles import product_of, tile_for
from .transposed import gradient_of


@triton.jit(do_not_specialize=["rows"])
def grouped_mm_kernel(
    x, w, out, offsets, order, bias, weights, scale, x_scale, rows, N, K, experts, top_k,
    stride_xr, stride_we, stride_wk, stride_wn, stride_or, stride_be, stride_se, stride_sk, stride_sn, stride_xsr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATHER: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr,
    WEIGHTS: tl.constexpr, SCALE: tl.constexpr, X_SCALE: tl.constexpr, X_DESCRIPTOR: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr, SPECIALIZE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """`out[r] = (x[source(r)] @ w[e] * scale + bias[e]) * weights[order[r]]`, its steps as the constexprs say.

    With GATHER, `source(r) = order[r] // top_k`. With TAIL, rows of no expert become zero; else they are not written.
    CODES says how 8-bit operands are multiplied, see `accumulate`.
    Scales are of columns ("n"), of 128 by 128 ("block") or of K ("k"); those of x of rows ("row") or of 128 ("block").
    """
    last = last_tiles(offsets, rows, experts, EXPERTS, BLOCK_M, TAIL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.max(last, 0) * tiles_n, tl.num_programs(0)):
        expert, tile_m, tile_n, before = place_of(tile, last, tiles_n, GROUP)
        first, end = rows_of(tile_m, before, offsets, expert, rows, experts, BLOCK_M)
        row = first + tl.arange(0, BLOCK_M)
        taken = row < end
        source = tl.where(taken, row, first)
        pair = source
        if GATHER or WEIGHTS:
            pair = tl.load(order + source)
        if GATHER:
            source = pair // top_k
        column = tile_n * BLOCK_N
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < N
        steps = tl.where(expert < experts, K, 0)
        acc, _ = accumulate(
            x, source.to(tl.int64), stride_xr, first, w, expert, stride_we, stride_wk, stride_wn,
            scale, stride_se, stride_sk, stride_sn, x_scale, stride_xsr, column, column, inside, N, K, steps,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, False, X_DESCRIPTOR, LAYOUT, SCALE, X_SCALE == "block",
            PRECISION, SPECIALIZE, CODES,
        )  # fmt: skip
        # Rows of no expert have no scale, bias or weight, which might be NaN.
        here = columns < tl.where(expert < experts, N, 0)
        if SCALE == "n":
            acc *= tl.load(scale + expert.to(tl.int64) * stride_se + columns * stride_sn, mask=here, other=0.0)[None, :]
        owned = row < tl.where(expert < experts, end, 0)
        if X_SCALE == "row":
            acc *= tl.load(x_scale + source.to(tl.int64) * stride_xsr, mask=owned, other=0.0)[:, None]
        if BIAS:
            added = tl.load(bias + expert.to(tl.int64) * stride_be + columns, mask=here, other=0.0)
            acc += added.to(tl.float32)[None, :]
        if WEIGHTS:
            acc *= tl.load(weights + pair, mask=owned, other=0.0).to(tl.float32)[:, None]
        places = out + row.to(tl.int64)[:, None] * stride_or + columns[None, :]
        tl.store(places, narrow(acc, out.dtype.element_ty), mask=taken[:, None] & inside[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    tile: Tile,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    gather: bool = False,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    zero_rest: bool = False,
) -> Tensor:
    """Launch the kernel.

    Args:
        x: `[rows, K]` sorted by expert, or `[tokens, K]` with `gather`.
        weight: `[experts, K, N]`, any strides.
        offsets: `[experts]` int32, the end row of each expert.
        tile: the configuration.
        order: `[rows]` int32, the pair (token times top_k plus choice) of each sorted row; for `gather` and `weights`.
        top_k: choices of a token.
        gather: read the row of the pair's token.
        bias: `[experts, N]`, its last dimension contiguous.
        weights: `[pairs]`, contiguous: what each row is multiplied by in the end.
        scale: float32 `[experts, a, b]`, scales of 8-bit weights, see the kernel.
        x_scale: float32 `[rows, 1 or blocks]`, scales of an 8-bit x.
        out_dtype: of the result; None is x's.
        zero_rest: fill the rows of no expert with zeros; else they are left as they are.

    Returns:
        `[rows, N]`.

    Raises:
        ValueError: k of the tile is over 128 and scales are of blocks.
    """
    x = inner_contiguous(x)
    experts, inner, columns = weight.shape
    rows = x.shape[0] if order is None else order.shape[0]
    out = x.new_empty(rows, columns, dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    if experts == 0:
        return out.zero_()
    source = None if gather else rows_descriptor(x, tile)
    matrices, layout = weight_descriptor(weight, tile, tile.n)
    strides_of_scale = (0, 0, 0) if scale is None else scale.stride()
    kind = scales_of(scale, weight)
    x_scales = "" if x_scale is None else "row" if x_scale.shape[1] == 1 else "block"
    for each in (kind, x_scales):
        check_scales(each, tile)
    tiles = most_tiles(rows, experts, tile.m) * triton.cdiv(columns, tile.n)
    grouped_mm_kernel[(programs(x.device, tiles, tile.warps),)](
        x if source is None else source, matrices, out, offsets.contiguous(),
        order if order is not None else offsets, bias if bias is not None else out,
        weights if weights is not None else out, scale if scale is not None else out,
        x_scale if x_scale is not None else out, rows, columns, inner, experts, top_k,
        x.stride(0), *weight.stride(), out.stride(0), 0 if bias is None else bias.stride(0), *strides_of_scale,
        0 if x_scale is None else x_scale.stride(0),
        EXPERTS=padded(experts), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
        EVEN_K=inner % tile.k == 0, EVEN_N=columns % tile.n == 0, GATHER=gather, TAIL=zero_rest, BIAS=bias is not None,
        WEIGHTS=weights is not None, SCALE=kind, X_SCALE=x_scales, X_DESCRIPTOR=source is not None, LAYOUT=layout,
        PRECISION=precision(x), SPECIALIZE=tile.specialize and source is not None and layout != "",
        CODES=codes_of(x.dtype, weight.dtype, kind, out.dtype, chip_of(x.device)), **tile.options(),
    )  # fmt: skip
    return out


def product(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    config: Mapping[str, str] | None = None,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`multiply` with the tile of a configuration, or the default; rows of no expert are zero."""
    kind = scales_of(scale, weight)
    codes = codes_of(x.dtype, weight.dtype, kind, out_dtype or x.dtype, chip_of(x.device)) != ""
    x_in_blocks = x_scale is not None and x_scale.shape[1] > 1
    each_step = "block" if x_in_blocks and codes else kind
    tile = tile_for(product_of(each_step, codes=codes), x, x.shape[0], weight.shape, config)
    out_dtype, x, weight = out_dtype or x.dtype, as_read(x), as_read(weight)
    return multiply(x, weight, offsets, tile, scale=scale, x_scale=x_scale, out_dtype=out_dtype, zero_rest=True)


@on_its_device
def forward(call: Any) -> Tensor:
    """Op `moe.grouped_mm` for float32, bfloat16 and float16, with float32 sums.

    Args:
        call: the call of the op; its configuration may name a `tile`, see `kpt_triton.tile.Tile`.

    Returns:
        `[rows, N]` of x's dtype.
    """
    return product(call.x, call.weight, call.offsets, call.config)


@on_its_device
def backward(call: Any, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are wanted, with default tiles.

    Args:
        call: the call of `forward`.
        saved: nothing.
        grad: of its result.
    """
    grads = {}
    if "x" in call.needs:
        grads["x"] = product(grad, call.weight.mT, call.offsets)
    if "weight" in call.needs:
        grads["weight"] = gradient_of(call.weight, call.x, grad, call.offsets)
    return grads
