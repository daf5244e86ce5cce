"""The grouped product with 8-bit weights and their scales: `out[r] = (x[r] * x_scale[r]) @ (weight[e] * scale[e])`."""

from typing import Any

import torch
from torch import Tensor

from kpt_triton.launching import on_its_device

from .grouped_mm import product


@on_its_device
def forward(call: Any) -> Tensor:
    """Op `moe.scaled_grouped_mm`: products and scales in float32, rounded once.

    Args:
        call: the call of the op, of anything but float64; its configuration may name a `tile`, see
            `kpt_triton.tile.Tile`.

    Returns:
        `[rows, N]`.

    Raises:
        ValueError: k of the tile is over 128 and scales are of blocks.
    """
    x, x_scale = call.x, call.x_scale
    return product(
        x,
        call.weight,
        call.offsets,
        call.config,
        scale=_of_matrices(call.scale),
        x_scale=None if x_scale is None else x_scale.float().contiguous(),
        out_dtype=call.out_dtype or (torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype),
    )


@on_its_device
def backward(call: Any, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """The gradient of a floating x; nothing is read of x itself.

    Args:
        call: the call of `forward`.
        saved: nothing.
        grad: of its result.
    """
    scale = _of_matrices(call.scale).mT
    return {"x": product(grad, call.weight.mT, call.offsets, scale=scale, out_dtype=call.x.dtype)}


def _of_matrices(scale: Tensor) -> Tensor:
    """`[experts, a, b]` in float32."""
    return (scale.unsqueeze(1) if scale.dim() == 2 else scale).float()
