"""Quantising while training: nothing that is not finite gets lost, and what happened is counted from the codes."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_fp8.dequantize import dequantize
from kpt_fp8.formats import FORMATS
from kpt_fp8.quantize import quantize
from kpt_fp8.scales import BLOCKS, scale_of

#: Whose numbers are quantised: rows of what a layer observes.
ROLES = ("input", "weight", "gradient")
INPUT, WEIGHT, GRADIENT = range(3)
#: What is observed of them: columns.
OBSERVED = ("amax", "saturated", "zeros", "error")
AMAX, SATURATED, ZEROS, ERROR = range(4)


def current(x: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise by the scale that the numbers ask for; where one is not finite, the scale that it shares is NaN.

    By itself `fp8.quantize` would let an infinity saturate, and an overflow would pass for a large number. The largest
    magnitudes are found here and given to it as scales, so that this takes no further read.

    Returns:
        Codes, their scale, and the largest magnitude, `[]`, which is not finite where a number isn't.
    """
    if x.numel() == 0:
        codes, scale = quantize(x, dtype=dtype, granularity=granularity)
        return codes, scale, scale.new_zeros(())
    amax = _magnitudes(x, granularity).to(torch.float32)
    finite = amax.isfinite()
    scale = scale_of(torch.where(finite, amax, 0.0), FORMATS[dtype].most, "none")
    codes, scale = quantize(x, scale, dtype=dtype, granularity=granularity)
    return codes, torch.where(finite, scale, math.nan), amax.max()


def _magnitudes(x: Tensor, granularity: str) -> Tensor:
    """As `scales.largest`, but what is not finite stays so."""
    rows, columns = BLOCKS[granularity]
    if rows is None:
        return largest_of(x)
    if columns is None:
        return x.abs().amax(-1)
    over = (0, -x.shape[-1] % columns) + ((0, -x.shape[-2] % rows) if rows > 1 else ())
    tiles: Tensor = F.pad(x.abs(), over).unflatten(-1, (-1, columns)).amax(-1)
    return tiles.unflatten(-2, (-1, rows)).amax(-2) if rows > 1 else tiles


def largest_of(x: Tensor) -> Tensor:
    """The largest magnitude, `[]`: not finite where a number isn't. `x` is read once, and has a number at least."""
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most)


def observed_now(codes: Tensor, amax: Tensor) -> Tensor:
    """What is observed under current scales: a row of `OBSERVED`, of which nothing saturates."""
    return torch.stack((amax, torch.zeros_like(amax), _zeros(_bits(codes)), torch.zeros_like(amax)))


def observed_delayed(codes: Tensor, scale: Tensor) -> Tensor:
    """What is observed under a delayed scale, from the codes alone: the numbers are not read again.

    The largest magnitude is that of the largest code, so it is rounded as codes are. Where codes saturate, it is not
    known.
    """
    bits, form = _bits(codes), FORMATS[codes.dtype]
    if codes.numel() == 0:
        return torch.zeros(len(OBSERVED), device=codes.device)
    largest = torch.full((), form.most, device=codes.device).to(codes.dtype).view(torch.uint8)
    amax = bits.max().view(codes.dtype).to(torch.float32) * scale
    # Zeros of the difference: to compare and to count bools takes twice as long.
    saturated = _zeros(bits ^ largest)
    return torch.stack((amax, saturated, _zeros(bits), torch.zeros_like(amax)))


def error_of(x: Tensor, codes: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """The mean over rows of each row's relative error, `[]` float32: rows that became zero count 1, however small.

    This reads the numbers again, so it is for steps that are measured.
    """
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    wide = x.to(torch.float32)
    # By the largest magnitude first: squares of small gradients would be zero.
    tops = wide.abs().amax(-1, keepdim=True)
    unit = torch.where(tops == 0, 1.0, tops)
    noise = (dequantize(codes, scale, granularity=granularity, dtype=torch.float32) - wide) / unit
    size = (wide / unit).square().sum(-1).clamp(min=1.0)
    return (noise.square().sum(-1) / size).sqrt().mean()


def _bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) & 0x7F


def _zeros(bits: Tensor) -> Tensor:
    """The share of codes that are zero, `[]` float32: what underflowed, and what was zero before."""
    # Subtracted before it is rounded: a single one counts, however many there are.
    return (bits.numel() - torch.count_nonzero(bits)).to(torch.float32) / max(bits.numel(), 1)
