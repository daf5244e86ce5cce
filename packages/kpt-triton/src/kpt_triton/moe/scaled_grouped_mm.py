"""The grouped product with 8-bit weights and their scales: `out[r] = (x[r] * x_scale[r]) @ (weight[e] * scale[e])`."""

from typing import Any

import torch
from torch import Tensor

from kpt_triton.tile import Tile

from .checking import FLOAT8, check_product, check_scale, check_x_scale
from .experts_forward import scales_of
from .grouped_mm import multiply, tile_for
from .launching import on_its_device

_library = torch.library.Library("kpt_triton", "FRAGMENT")
_library.define(
    "scaled_grouped_mm(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale, Tensor offsets, ScalarType out_dtype, "
    "str tile) -> Tensor"
)


@torch.library.impl(_library, "scaled_grouped_mm", "CompositeExplicitAutograd")
@on_its_device
def _scaled_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
    tile: str,
) -> Tensor:
    of = scales_of(scale, weight)
    chosen = Tile.parse(tile) if tile else tile_for(x, weight, of)
    return multiply(
        x,
        weight,
        offsets.contiguous(),
        chosen,
        scale=scale,
        scales_of=of,
        x_scale=None if x_scale is None else x_scale.contiguous(),
        out_dtype=out_dtype,
        zero_rest=True,
    )


@torch.library.register_fake("kpt_triton::scaled_grouped_mm", lib=_library)
def _scaled_grouped_mm_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
    tile: str,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2], dtype=out_dtype)


def scaled_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: str = "",
) -> Tensor:
    """Multiply each expert's rows by its matrix of 8-bit numbers and their scales, in float32, rounded once.

    Differentiable with respect to a floating x.

    Args:
        x: `[rows, K]`, sorted by expert; float32, bfloat16 or float16, or 8-bit with an `x_scale`.
        weight: `[experts, K, N]` of float8_e4m3fn or float8_e5m2, any strides.
        scale: float32 or float64: `[experts, N]` or `[experts, 1, N]` (columns), `[experts, K, 1]`, or one for each 128
            by 128, `[experts, ceil(K / 128), ceil(N / 128)]`.
        offsets: `[experts]` int32, the end row of each expert.
        x_scale: float32 or float64 `[rows, 1]` or `[rows, ceil(K / 128)]`.
        out_dtype: of the result; None is x's, and bfloat16 for an 8-bit x.
        tile: see `kpt_triton.tile.Tile`; k is at most 128 where scales are of blocks.

    Returns:
        `[rows, N]`; rows at and past `offsets[-1]` are zero.

    Raises:
        ValueError: a shape, dtype or device does not fit, or k of the tile is over 128 and scales are of blocks.
    """
    check_product("scaled_grouped_mm", x, weight, offsets, FLOAT8)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    scale = (scale.unsqueeze(1) if scale.dim() == 2 else scale).float()
    check_scale("scaled_grouped_mm", weight, scale)
    check_x_scale("scaled_grouped_mm", x, x_scale)
    x_scale = None if x_scale is None else x_scale.float()
    return _ScaledGroupedMM.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, weight, scale, x_scale, offsets, out_dtype, tile
    )


class _ScaledGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        x_scale: Tensor | None,
        offsets: Tensor,
        out_dtype: torch.dtype,
        tile: str,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale, offsets)
        ctx.dtype = x.dtype
        return torch.ops.kpt_triton.scaled_grouped_mm.default(  # type: ignore[no-any-return]
            x, weight, scale, x_scale, offsets, out_dtype, tile
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, scale, offsets = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = scaled_grouped_mm(grad, weight.mT, scale.mT, offsets, out_dtype=ctx.dtype)
        return grad_x, None, None, None, None, None, None
