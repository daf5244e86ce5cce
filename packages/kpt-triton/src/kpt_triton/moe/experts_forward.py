"""The first half of the experts: gather, gate and up projection, and the activation, in one kernel."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.chips import chip_of
from kpt_triton.launching import inner_contiguous, precision, programs
from kpt_triton.numeric import narrow
from kpt_triton.tile import Tile

from .activation import GATED, activate
from .launching import check_scales, codes_of, most_tiles, padded, scales_of, weight_descriptor
from .mainloop import accumulate, last_tiles, place_of, rows_of


@dataclass(frozen=True, slots=True)
class Gating:
    """The activation of the experts, see `kpt_triton.moe.activation`, and where gate and up lie.

    Attributes:
        name: of the activation.
        interleaved: gate and up alternate instead of being two halves.
        alpha: of `swiglu`.
        beta: likewise.
        limit: likewise; None for none.
    """

    name: str
    interleaved: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def gated(self) -> bool:
        """Whether there are gate and up."""
        return self.name in GATED

    @property
    def product(self) -> str:
        """The kind of product that makes the pre-activation, for `kpt_triton.moe.tiles`."""
        return "pair" if self.gated else "crowded"

    @property
    def product_of_codes(self) -> str:
        """Likewise where x is of 8 bits, too."""
        return f"{self.product}_codes"

    def numbers(self) -> tuple[float, float, float]:
        """The parameters, as a launch takes them."""
        return self.alpha, self.beta, 0.0 if self.limit is None else self.limit

    def constants(self) -> dict[str, str | bool]:
        """What a kernel is compiled for."""
        interleaved = self.interleaved and self.gated
        limited = self.limit is not None
        return {"NAME": self.name, "IS_GATED": self.gated, "INTERLEAVED": interleaved, "LIMITED": limited}


@triton.jit(do_not_specialize=["rows"])
def up_kernel(
    x, w, out, h, offsets, order, bias, scale, x_scale, rows, N, K, width, experts, top_k, alpha, beta, limit,
    stride_xr, stride_we, stride_wk, stride_wn, stride_or, stride_hr, stride_be, stride_se, stride_sk, stride_sn,
    stride_xsr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, NAME: tl.constexpr, IS_GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, SCALE: tl.constexpr, X_SCALE: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """`out[r] = act(x[order[r] // top_k] @ w[e] * scale + bias[e])`, and with SAVE the product in `h`, without bias.

    N is the size of the activation, width that of the pre-activation: 2 N for gate and up. Of an 8-bit x, scales are
    of rows ("row") or of 128 numbers of one ("block"); CODES says how it is multiplied, see `accumulate`.
    """
    PAIR: tl.constexpr = IS_GATED and not INTERLEAVED
    SPAN: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    last = last_tiles(offsets, rows, experts, EXPERTS, BLOCK_M, False)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.max(last, 0) * tiles_n, tl.num_programs(0)):
        expert, tile_m, tile_n, before = place_of(tile, last, tiles_n, GROUP)
        first, end = rows_of(tile_m, before, offsets, expert, rows, experts, BLOCK_M)
        row = first + tl.arange(0, BLOCK_M)
        taken = row < end
        source = tl.load(order + tl.where(taken, row, first)) // top_k
        column = tile_n * SPAN
        columns = column + tl.arange(0, SPAN)
        inside = columns < (width if INTERLEAVED else N)
        acc, other = accumulate(
            x, source.to(tl.int64), stride_xr, first, w, expert, stride_we, stride_wk, stride_wn,
            scale, stride_se, stride_sk, stride_sn, x_scale, stride_xsr, column, N + column, inside, width, K, K,
            BLOCK_M, SPAN, BLOCK_K, EVEN_K, EVEN_N, PAIR, False, LAYOUT, SCALE, X_SCALE == "block", PRECISION, False,
            CODES,
        )  # fmt: skip
        if X_SCALE == "row":
            of_rows = tl.load(x_scale + source.to(tl.int64) * stride_xsr)
            acc *= of_rows[:, None]
            if PAIR:
                other *= of_rows[:, None]
        if SCALE == "n":
            scales = scale + expert.to(tl.int64) * stride_se + columns * stride_sn
            acc *= tl.load(scales, mask=inside, other=0.0)[None, :]
            if PAIR:
                other *= tl.load(scales + N * stride_sn, mask=inside, other=0.0)[None, :]
        mask = taken[:, None] & inside[None, :]
        if SAVE:
            places = h + row.to(tl.int64)[:, None] * stride_hr + columns[None, :]
            tl.store(places, narrow(acc, h.dtype.element_ty), mask=mask)
            if PAIR:
                tl.store(places + N, narrow(other, h.dtype.element_ty), mask=mask)
        if BIAS:
            biases = bias + expert.to(tl.int64) * stride_be + columns
            acc += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
            if PAIR:
                other += tl.load(biases + N, mask=inside, other=0.0).to(tl.float32)[None, :]
        if INTERLEAVED:
            acc, other = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        value = activate(acc, other, alpha, beta, limit, NAME, IS_GATED, LIMITED)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        places = out + row.to(tl.int64)[:, None] * stride_or + columns[None, :]
        tl.store(places, narrow(value, out.dtype.element_ty), mask=taken[:, None] & (columns < N)[None, :])


def multiply_and_activate(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    offsets: Tensor,
    top_k: int,
    act: Gating,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    save: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel.

    Args:
        x: `[tokens, K]`.
        weight: `[experts, K, width]`, any strides.
        order: `[rows]` int32, the pair of each sorted row.
        offsets: `[experts]` int32, the end row of each expert.
        top_k: choices of a token.
        act: the activation.
        tile: the configuration; of gate and up there are n columns each.
        bias: `[experts, width]`, its last dimension contiguous.
        scale: float32 `[experts, a, b]`, scales of 8-bit weights, of columns or blocks.
        x_scale: float32 `[tokens, 1 or blocks]`, scales of an 8-bit x.
        out_dtype: of the result; None is x's.
        save: keep the pre-activation.

    Returns:
        The activation `[rows, N]` and the pre-activation without bias `[rows, width]` (`[0, width]` unless `save`), of
        x's dtype. Rows of no expert are left as they are.
    """
    kind = scales_of(scale, weight)
    x_scales = "" if x_scale is None else "row" if x_scale.shape[1] == 1 else "block"
    for each in (kind, x_scales):
        check_scales(each, tile)
    x = inner_contiguous(x)
    experts, inner, width = weight.shape
    columns = width // 2 if act.gated else width
    rows = order.shape[0]
    out = x.new_empty(rows, columns, dtype=out_dtype or x.dtype)
    h = out.new_empty(rows if save else 0, width)
    if out.numel() == 0:
        return out, h
    constants = act.constants()
    interleaved = constants["INTERLEAVED"]
    matrices, layout = weight_descriptor(weight, tile, tile.n * (2 if interleaved else 1))
    strides = (0, 0, 0) if scale is None else scale.stride()
    tiles = most_tiles(rows, experts, tile.m) * triton.cdiv(columns, tile.n)
    up_kernel[(programs(x.device, tiles, tile.warps),)](
        x, matrices, out, h if save else out, offsets, order, bias if bias is not None else out,
        scale if scale is not None else out, x_scale if x_scale is not None else out, rows, columns, inner, width,
        experts, top_k, *act.numbers(), x.stride(0), *weight.stride(), out.stride(0), width,
        0 if bias is None else bias.stride(0), *strides, 0 if x_scale is None else x_scale.stride(0),
        EXPERTS=padded(experts), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=tile.group,
        EVEN_K=inner % tile.k == 0, EVEN_N=columns % tile.n == 0, **constants, BIAS=bias is not None, SAVE=save,
        SCALE=kind, X_SCALE=x_scales, LAYOUT=layout, PRECISION=precision(x),
        CODES=codes_of(x.dtype, weight.dtype, kind, out.dtype, chip_of(x.device)), **tile.options(),
    )  # fmt: skip
    return out, h
