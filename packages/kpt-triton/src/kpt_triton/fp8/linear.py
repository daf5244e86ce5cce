"""`fp8.linear` with an 8-bit weight alone, for few rows: codes are widened as they are loaded, not in memory before.

It is the grouped product of one group. Reading the weight is what takes time, so that tiles are as narrow as it takes
for every multiprocessor to have one. Of many rows products are, and there the vendor's library is faster by more than
it costs to widen the weight first: an H200 ran this loop at 300 TFLOP/s and its library at 750.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kpt_triton.chips import no_codes
from kpt_triton.contracts import BF16, E4M3, Tiles, products
from kpt_triton.launching import as_read, on_its_device, programs
from kpt_triton.moe.contracts.common import usual
from kpt_triton.moe.contracts.grouped_mm import program
from kpt_triton.moe.grouped_mm import multiply, product
from kpt_triton.moe.tiles import tile_for
from kpt_triton.tile import narrowed

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Rows up to which this is meant to be the faster way.
_MOST_ROWS = 1024
#: More tiles than any chip has places for.
_MANY = 1 << 30


def unsupported(call: Any) -> str | None:
    """Return why a call is not for this kernel, or None."""
    x, weight = call.x, call.weight
    if call.activations != "none":
        return "activations in 8 bits; this kernel is for the weight alone"
    if call.granularity not in ("tensor", "row", "128x128"):
        return "scales of parts of rows; this kernel takes one for the tensor, a row, or 128x128"
    if weight.dtype not in _FLOAT8:
        return "a weight in fnuz; this kernel widens e4m3fn and e5m2"
    if call.scale.dtype is torch.float64:
        return "scales in float64; this kernel sums in float32"
    if x.shape[0] > _MOST_ROWS:
        return f"more than {_MOST_ROWS} rows, for which the library's product of a widened weight is faster"
    if not (x.numel() and weight.numel()):
        return "there is nothing to compute"
    return no_codes(x.device, x.dtype, weight.dtype)


@on_its_device
def forward(call: Any) -> Tensor:
    """Op `fp8.linear`: products, scales and bias in float32, rounded once.

    Args:
        call: the call of the op; its configuration may name a `tile`, see `kpt_triton.tile.Tile`.

    Returns:
        `[M, N]` of x's dtype.
    """
    x, bias = call.x, call.bias
    weight, scale = _matrix(call)
    kind = "crowded" if call.granularity == "128x128" else "plain"
    tile = tile_for(kind, x, x.shape[0], weight.shape, call.config)
    if call.config is None:
        tile = narrowed(tile, weight.shape[2], programs(x.device, _MANY, warps=16))
    return multiply(x, weight, _end(x), tile, scale=scale, bias=None if bias is None else bias.contiguous()[None])


@on_its_device
def backward(call: Any, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """The gradients of x and bias; nothing is read of x itself.

    Args:
        call: the call of `forward`.
        saved: nothing.
        grad: of its result.
    """
    found = {}
    if "x" in call.needs:
        weight, scale = _matrix(call)
        found["x"] = product(grad, weight.mT, _end(grad), scale=scale.mT, out_dtype=call.x.dtype)
    if "bias" in call.needs:
        found["bias"] = grad.float().sum(0).to(grad.dtype)
    return found


def _matrix(call: Any) -> tuple[Tensor, Tensor]:
    """Return the codes as one matrix `[1, K, N]`, and their scales `[1, a, b]`."""
    scale = call.scale.float()
    if call.granularity == "tensor":
        scale = scale.expand(call.weight.shape[0])
    return as_read(call.weight).t()[None], (scale[None] if scale.dim() == 1 else scale.t())[None]


def _end(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _narrow(product: str, width: int) -> Tiles:
    """Return the tiles for 16 rows of a weight of few columns."""
    return lambda chip: [replace(tile, n=min(tile.n, width)) for tile in usual(product, 16)(chip)]


#: Sixteen bytes of spills were seen with 32 columns.
_CONTRACTS = {
    chip: clauses.replace("no spills", "spills <= 16 B") if chip == "sm100" else clauses
    for chip, clauses in products(BF16, tall=False).items()
}
AOT = tuple(
    program(
        f"bf16 by e4m3, {by}, {width} columns",
        BF16,
        _CONTRACTS,
        _narrow(kind, width),
        weight=E4M3,
        SCALE=scale,
        BIAS=True,
    )
    for by, kind, scale in (("rows", "plain", "n"), ("blocks", "crowded", "block"))
    for width in (16, 32)
)
