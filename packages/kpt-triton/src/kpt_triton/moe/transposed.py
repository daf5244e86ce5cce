"""The kernel for the gradient of the experts' matrices: `out[e] = x[rows of e].T @ grad[rows of e]`."""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.launching import inner_contiguous, precision, programs
from kpt_triton.numeric import dot, narrow
from kpt_triton.tile import Tile

from .tiles import tile_for


@triton.jit
def wgrad_kernel(
    x, grad, out, offsets, order, K, N, experts, top_k, stride_xr, stride_gr, stride_oe, stride_ok,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATHER_X: tl.constexpr, GATHER_GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """With GATHER_X (or GATHER_GRAD), sorted row r is row `order[r] // top_k` of x (or grad)."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), experts * tiles_k * tiles_n, tl.num_programs(0)):
        expert = tile // (tiles_k * tiles_n)
        place = tile % (tiles_k * tiles_n)
        band = place // (GROUP * tiles_n)
        height = tl.minimum(tiles_k - band * GROUP, GROUP)
        tile_k = band * GROUP + place % (GROUP * tiles_n) % height
        tile_n = place % (GROUP * tiles_n) // height
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert, mask=expert < experts, other=0)
        inner = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        steps = tl.arange(0, BLOCK_R)
        # Which rows to gather is read a step ahead: a load that waits for another one in its own step is not pipelined.
        ahead = steps
        if GATHER_X or GATHER_GRAD:
            ahead = tl.load(order + start + steps, mask=start + steps < end, other=0)
        for first in tl.range(start, end, BLOCK_R):
            row = first + steps
            taken = row < end
            token = row
            if GATHER_X or GATHER_GRAD:
                token = ahead // top_k
                following = row + BLOCK_R
                ahead = tl.load(order + following, mask=following < end, other=0)
            x_rows = token if GATHER_X else row
            grad_rows = token if GATHER_GRAD else row
            x_mask = taken[None, :]
            grad_mask = taken[:, None]
            if not EVEN_K:
                x_mask = x_mask & (inner < K)[:, None]
            if not EVEN_N:
                grad_mask = grad_mask & (columns < N)[None, :]
            # Loaded as it is multiplied: what is turned between load and product is not pipelined before sm90.
            x_tile = tl.load(x + x_rows.to(tl.int64)[None, :] * stride_xr + inner[:, None], mask=x_mask, other=0.0)
            grad_tile = tl.load(
                grad + grad_rows.to(tl.int64)[:, None] * stride_gr + columns[None, :], mask=grad_mask, other=0.0
            )
            acc = dot(x_tile, grad_tile, acc, PRECISION)
        places = out + expert.to(tl.int64) * stride_oe + inner.to(tl.int64)[:, None] * stride_ok + columns[None, :]
        inside = (inner < K)[:, None] & (columns < N)[None, :]
        tl.store(places, narrow(acc, out.dtype.element_ty), mask=inside)


def multiply_transposed(
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    tile: Tile,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    gather_x: bool = False,
    gather_grad: bool = False,
) -> Tensor:
    """Launch the kernel.

    Args:
        x: `[rows, K]` sorted by expert, or `[tokens, K]` with `gather_x`.
        grad: `[rows, N]`, or `[tokens, N]` with `gather_grad`.
        offsets: `[experts]` int32.
        tile: its m is the tile's size along K, n along N, k the rows of a step.
        order: `[rows]` int32, the pair of each sorted row.
        top_k: choices of a token.
        gather_x: read x by the pair's token.
        gather_grad: likewise grad.

    Returns:
        `[experts, K, N]`, contiguous, of x's dtype.
    """
    x, grad = inner_contiguous(x), inner_contiguous(grad)
    experts, inner, columns = offsets.shape[0], x.shape[1], grad.shape[1]
    out = x.new_empty(experts, inner, columns)
    if out.numel() == 0:
        return out
    tiles = experts * triton.cdiv(inner, tile.m) * triton.cdiv(columns, tile.n)
    wgrad_kernel[(programs(x.device, tiles, tile.warps),)](
        x, grad, out, offsets.contiguous(), order if order is not None else offsets, inner, columns, experts, top_k,
        x.stride(0), grad.stride(0), out.stride(0), out.stride(1),
        BLOCK_K=tile.m, BLOCK_N=tile.n, BLOCK_R=tile.k, GROUP=tile.group,
        EVEN_K=inner % tile.m == 0, EVEN_N=columns % tile.n == 0, GATHER_X=gather_x, GATHER_GRAD=gather_grad,
        PRECISION=precision(x), **tile.options(),
    )  # fmt: skip
    return out


def gradient_of(
    weight: Tensor,
    x: Tensor,
    grad: Tensor,
    offsets: Tensor,
    config: Mapping[str, str] | None = None,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    gather_x: bool = False,
    gather_grad: bool = False,
) -> Tensor:
    """The gradient of `weight` `[experts, K, N]`, in its own memory order, which spares autograd a copy.

    Args:
        weight: what x was multiplied by.
        x: and all that follows: as `multiply_transposed` has it.
        grad: of the product.
        offsets: of the rows.
        config: may have a tile under `wgrad`.
        order: of the rows.
        top_k: choices of a token.
        gather_x: read x by the pair's token.
        gather_grad: likewise grad.
    """
    rows = x.shape[0] if order is None else order.shape[0]
    tile = tile_for("wgrad", x, rows, weight.shape, config, "wgrad")
    of_rows: dict[str, Any] = {"order": order, "top_k": top_k}
    if weight.stride(1) < weight.stride(2):
        return multiply_transposed(grad, x, offsets, tile, **of_rows, gather_x=gather_grad, gather_grad=gather_x).mT
    return multiply_transposed(x, grad, offsets, tile, **of_rows, gather_x=gather_x, gather_grad=gather_grad)
