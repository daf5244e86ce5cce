"""Quantising a weight part by part: beside the result, only some rows are in memory as anything wider."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError

from .dequantize import dequantize
from .formats import FORMATS, require_floating, require_fp8
from .quality import Quality, QualityMeter
from .quantize import quantize
from .scales import BLOCKS, check_granularity, largest, scale_of, scale_shape

#: Rows of a part: a multiple of those of a block, and so many that a part has about these numbers.
_ROWS = 128
_NUMBERS = 1 << 17
#: OCP Microscaling with scales that are rounded up, so that nothing saturates.
MXFP8 = "mxfp8"


def scale_format(granularity: str, power_of_two: bool) -> tuple[str, torch.dtype, str]:
    """Return the granularity, the scale's dtype and its rounding, as op `fp8.quantize` takes them."""
    if granularity not in (*BLOCKS, MXFP8):
        raise UnknownNameError("granularity", granularity, (*BLOCKS, MXFP8))
    if granularity == MXFP8:
        return "1x32", torch.float8_e8m0fnu, "up"
    return granularity, torch.float32, "up" if power_of_two else "none"


def require_finite(owner: str, name: str, weight: Tensor) -> None:
    """Raise `InputError` where a weight holds NaN or infinity, or has no data that could be looked at."""
    if weight.is_meta:
        raise InputError(f"{owner}: {name} is on the meta device and has no numbers: load the weights first")
    bad = sum(part.numel() - int(part.to(torch.float32).isfinite().sum()) for _, part in _parts(weight.detach()))
    if bad:
        raise InputError(
            f"{owner}: {name} must hold numbers that are finite in float32; got {bad} of {weight.numel()} that are NaN "
            "or infinite: repair the weights, or leave this layer as it is"
        )


def quantize_weight(
    weight: Tensor,
    *,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool = False,
    meter: QualityMeter | None = None,
) -> tuple[Tensor, Tensor, Quality]:
    """Quantise a finite matrix part by part, as op `fp8.quantize` does to the bit.

    Returns:
        Codes `[N, K]`, contiguous, their scale, and the quality, which is that of all that `meter` has seen.
    """
    owner = "quantize_weight"
    require_floating(owner, "weight", weight.dtype)
    require_fp8(owner, "dtype", dtype)
    shared, scale_dtype, rounding = scale_format(granularity, power_of_two)
    check_granularity(owner, "weight", shared, weight.shape)
    weight = weight.detach()
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(scale_shape(weight.shape, shared), dtype=scale_dtype, device=weight.device)
    whole = shared == "tensor"
    if whole:
        tops = [largest(part.to(torch.float32), shared) for _, part in _parts(weight)]
        top = torch.stack(tops).max() if tops else weight.new_zeros((), dtype=torch.float32)
        scale.copy_(scale_of(top, FORMATS[dtype].most, rounding))
    meter = meter or QualityMeter()
    height = BLOCKS[shared][0] or 1
    for rows, part in _parts(weight):
        own = scale if whole else scale[rows.start // height : math.ceil(rows.stop / height)]
        made, scales = quantize(
            part,
            scale if whole else None,
            dtype=dtype,
            granularity=shared,
            scale_dtype=scale_dtype,
            scale_rounding=rounding,
        )
        codes[rows] = made
        if not whole:
            own.copy_(scales)
        meter.add(part, dequantize(made, scales, granularity=shared, dtype=torch.float32))
    return codes, scale, meter.result()


def _parts(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    many = max(_NUMBERS // max(weight.shape[1], 1) // _ROWS, 1) * _ROWS
    for start in range(0, weight.shape[0], many):
        rows = slice(start, min(start + many, weight.shape[0]))
        yield rows, weight[rows]
