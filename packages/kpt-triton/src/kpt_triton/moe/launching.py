"""How many tiles rows of experts have, and how matrices of experts and their scales are handed to a kernel."""

from typing import Any

import torch
import triton
from torch import Tensor

from kpt_triton.chips import INTERPRETER, SHORT_SUMS, multiplied
from kpt_triton.launching import descriptor
from kpt_triton.tile import Tile

from .mainloop import SCALE_BLOCK


def most_tiles(rows: int, experts: int, height: int) -> int:
    """The most tiles of `height` rows that `rows` rows of any load have; rows of no expert are an expert more."""
    return rows // height + min(experts + 1, rows)


def padded(experts: int) -> int:
    """A power of two above the number of experts."""
    return triton.next_power_of_2(experts + 1)  # type: ignore[no-any-return]


def scales_of(scale: Tensor | None, weight: Tensor) -> str:
    """What the scales `[experts, a, b]` of `weight` `[experts, K, N]` are of: "n", "k", "block", or "" for none."""
    if scale is None:
        return ""
    _, inner, columns = weight.shape
    sizes = tuple(scale.shape[1:])
    # Blocks first: one block is one scale too, and for some shapes also one for each column or of K.
    if sizes == (-(-inner // SCALE_BLOCK.value), -(-columns // SCALE_BLOCK.value)):
        return "block"
    return "n" if sizes == (1, columns) else "k"


def codes_of(x: torch.dtype, weight: torch.dtype, kind: str, out: torch.dtype, chip: str) -> str:
    """Return how 8-bit operands are multiplied, as CODES of `mainloop.accumulate`; "" where they are widened.

    Units that add with fewer bits than float32 has are exact enough for a result in bfloat16, which alone is asked of
    them: modelled sums of 13 bits had 1.01 of its mean error, but 1.3 of float16's.

    Args:
        x: dtype of what is multiplied.
        weight: by what.
        kind: what the weight's scales are of, see `scales_of`.
        out: dtype of the result.
        chip: that multiplies.
    """
    if kind == "k" or not {x, weight} <= set(multiplied(chip)):
        return ""
    if out is not torch.bfloat16 and chip != INTERPRETER:
        return ""
    return "promoted" if chip in (*SHORT_SUMS, INTERPRETER) else "native"


def check_scales(kind: str, tile: Tile) -> None:
    """Raise `ValueError` where a step of the tile would go past one block of scales."""
    if kind == "block" and tile.k > SCALE_BLOCK.value:
        raise ValueError(f"tile {tile}: k must be at most {SCALE_BLOCK.value} with scales of blocks; got {tile.k}")


def weight_descriptor(weight: Tensor, tile: Tile, width: int) -> tuple[Any, str]:
    """A descriptor of all experts' matrices and its layout; the tensor itself and "" where it can't be had.

    Args:
        weight: `[experts, K, N]`.
        tile: of the product.
        width: columns of a block.
    """
    experts, inner, columns = weight.shape
    found: Any | None = None
    layout = ""
    if tile.descriptors and weight.numel() > 0:
        stride_e, stride_k, stride_n = weight.stride()
        if stride_k == 1 and stride_e == columns * stride_n and stride_n >= inner:
            layout = "NK"
            found = descriptor(weight, experts * columns, inner, stride_n, (width, tile.k))
        elif stride_n == 1 and stride_e == inner * stride_k and stride_k >= columns and inner % tile.k == 0:
            # Past K begins the next expert, whose numbers a zero in x would not stop if they are no numbers.
            layout = "KN"
            found = descriptor(weight, experts * inner, columns, stride_k, (tile.k, width))
    return (weight, "") if found is None else (found, layout)
