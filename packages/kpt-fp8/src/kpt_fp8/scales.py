"""Scales: which numbers share one, how it is computed to the bit, and how it meets what it scales."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError

from .formats import NAMES_OF_SCALES, SCALE_DTYPES

#: By granularity, the rows and columns that share a scale; None for all of them.
BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
}
#: Whether scales are made powers of two: not, the next one, or the one before as OCP Microscaling 1.0 has it.
ROUNDINGS = ("none", "up", "down")
#: A scale is a normal number of float32: by less, a quotient would be infinite.
LEAST = torch.finfo(torch.float32).tiny


def scale_shape(shape: Sequence[int], granularity: str) -> list[int]:
    """Return the shape of the scales of numbers of a shape.

    Args:
        shape: `[..., K]`, and `[..., N, K]` for `128x128`.
        granularity: `tensor` has one scale for all, `[]`; `row` one for each row, `[...]`; `1x128` and `1x32` one for
            so many numbers of a row, `[..., ceil(K / 128)]`; `128x128` `[..., ceil(N / 128), ceil(K / 128)]`. `mxfp8`
            is `1x32`.

    Raises:
        UnknownNameError: no such granularity.
        InputError: the shape has too few dimensions for it.
    """
    if granularity not in (*BLOCKS, "mxfp8"):
        raise UnknownNameError("granularity", granularity, (*BLOCKS, "mxfp8"))
    granularity = "1x32" if granularity == "mxfp8" else granularity
    check_granularity("scale_shape", "shape", granularity, shape)
    rows, columns = BLOCKS[granularity]
    if rows is None:
        return []
    if columns is None:
        return list(shape[:-1])
    *others, last = shape
    if rows > 1:
        others[-1] = -(-others[-1] // rows)
    return [*others, -(-last // columns)]


def check_granularity(op: str, name: str, granularity: str, shape: Sequence[int]) -> None:
    """Raise unless numbers of a shape may have such scales."""
    if granularity not in BLOCKS:
        raise UnknownNameError("granularity", granularity, tuple(BLOCKS))
    least = 2 if granularity == "128x128" else 0 if granularity == "tensor" else 1
    if len(shape) < least:
        raise InputError(
            f"{op}: {name} must have {least} dimensions at least for scales of granularity {granularity!r}; "
            f"got {list(shape)}"
        )


def check_scale(op: str, name: str, scale: Tensor, shape: Sequence[int], granularity: str) -> None:
    """Raise `InputError` unless `scale` may be the scale of numbers of a shape."""
    expected = scale_shape(shape, granularity)
    if scale.dtype not in SCALE_DTYPES or list(scale.shape) != expected:
        raise InputError(
            f"{op}: {name} must be {NAMES_OF_SCALES} of shape {expected} for numbers of shape {list(shape)} and "
            f"granularity {granularity!r}; got {scale.dtype} {list(scale.shape)}"
        )


def tiled(x: Tensor, scale: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Return a view of numbers or codes, and their scale so that it broadcasts to it: no scale is repeated in memory.

    What is computed of the two has the view's shape, `[..., N / 128, 128, K / 128, 128]` for `128x128`. Only the scales
    of a row or column of blocks that ends early are repeated.
    """
    rows, columns = BLOCKS[granularity]
    if rows is None:
        return x, scale
    if columns is None:
        return x, scale.unsqueeze(-1)
    x, scale = _in_blocks(x, scale, -1, columns)
    return (x, scale) if rows == 1 else _in_blocks(x, scale, -3, rows)


def _in_blocks(x: Tensor, scale: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Split dimension `dim` of the numbers into blocks, each of which has one element of the scale's."""
    length = x.shape[dim]
    if length % size:
        scale = scale.repeat_interleave(size, dim, output_size=scale.shape[dim] * size).narrow(dim, 0, length)
        size = 1
    return x.unflatten(dim, (length // size, size)), scale.unsqueeze(dim)


def largest(x: Tensor, granularity: str) -> Tensor:
    """Return the largest finite magnitude of float32 numbers that share a scale; 0 where there is none."""
    magnitude = x.abs().nan_to_num_(0.0, 0.0)
    rows, columns = BLOCKS[granularity]
    if rows is None:
        # torch-xla's `amax` of no dimension gives back what it is given.
        return magnitude.max() if x.numel() else x.new_zeros(())
    if columns is None:
        return magnitude.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    tiles = _of_blocks(magnitude, -1, columns)
    return tiles if rows == 1 else _of_blocks(tiles, -2, rows)


def _of_blocks(magnitude: Tensor, dim: int, size: int) -> Tensor:
    """The largest of each block along a dimension, of which the last may end early."""
    blocks = -(-magnitude.shape[dim] // size)
    over = blocks * size - magnitude.shape[dim]
    if over:  # zeros change no maximum
        magnitude = F.pad(magnitude, (0, 0) * (-1 - dim) + (0, over))
    tops: Tensor = magnitude.unflatten(dim, (blocks, size)).amax(dim)
    return tops


def scale_of(amax: Tensor, most: float, rounding: str) -> Tensor:
    """Return what numbers are divided by, so that the largest of them becomes the largest that a format has, `most`.

    `amax / most`, divided in float32, and at least 2^-126. `up`: the next power of two, so that nothing saturates.
    `down`: 2^(floor(log2(amax)) - floor(log2(most))), as OCP Microscaling 1.0 has it; up to `2 / 1.75` of the largest
    number saturates. 1 where `amax` is 0. `amax` is float32, finite and not negative.
    """
    if rounding == "down":
        _, exponent = torch.frexp(amax)
        scale = power_of_two(exponent - math.frexp(most)[1])
    else:
        # By a tensor: on a GPU torch multiplies by the reciprocal of a plain number, which rounds twice.
        scale = (amax / torch.full_like(amax, most)).clamp(min=LEAST)
        if rounding == "up":
            mantissa, exponent = torch.frexp(scale)
            scale = power_of_two(torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(amax == 0, 1.0, scale)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, to the bit, between 2^-126 and 2^127."""
    bits: Tensor = (exponent.clamp(-126, 127) + 127) << 23
    return bits.to(torch.int32).view(torch.float32)
