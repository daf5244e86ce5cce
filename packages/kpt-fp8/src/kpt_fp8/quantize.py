"""Quantising numbers to 8 bits and a scale: op `fp8.quantize`."""

import math

import torch
from torch import Tensor

from kpt_core import Call, InputError, UnknownNameError, op

from .formats import FORMATS, NAMES_OF_SCALES, SCALE_DTYPES, require_floating, require_fp8
from .scales import ROUNDINGS, check_granularity, check_scale, largest, scale_of, scale_shape, tiled
from .stochastic import round_stochastically

_NAME = "fp8.quantize"


def _check(call: Call) -> None:
    x, scale = call.x, call.scale
    require_floating(_NAME, "x", x.dtype)
    require_fp8(_NAME, "dtype", call.dtype)
    check_granularity(_NAME, "x", call.granularity, x.shape)
    if scale is None:
        check_scale_format(_NAME, call.scale_dtype, call.scale_rounding)
        return
    check_scale(_NAME, "scale", scale, x.shape, call.granularity)
    if scale.device != x.device:
        raise InputError(f"{_NAME}: x is on {x.device}, but scale on {scale.device}: move one of them")


def check_scale_format(op: str, dtype: torch.dtype, rounding: str) -> None:
    """Raise unless scales may be computed so."""
    if rounding not in ROUNDINGS:
        raise UnknownNameError("scale_rounding", rounding, ROUNDINGS)
    if dtype not in SCALE_DTYPES:
        raise InputError(f"{op}: scale_dtype must be {NAMES_OF_SCALES}; got {dtype}")
    if dtype is torch.float8_e8m0fnu and rounding == "none":
        raise InputError(
            f"{op}: scales of float8_e8m0fnu are powers of two; got scale_rounding='none': give 'up' or 'down'"
        )


def _fake(call: Call) -> tuple[Tensor, Tensor]:
    x, scale = call.x, call.scale
    shape, dtype = scale_shape(x.shape, call.granularity), call.scale_dtype if scale is None else scale.dtype
    return x.new_empty(x.shape, dtype=call.dtype), x.new_empty(shape, dtype=dtype)


@op(_NAME, check=_check, fake=_fake, random=True)
def quantize(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "tensor",
    scale_dtype: torch.dtype = torch.float32,
    scale_rounding: str = "none",
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Divide numbers by a scale and round them to 8 bits; every bit of the result is specified.

    `x` is rounded to float32, divided by its scale in float32, clamped to the largest number of the format, so that
    infinities saturate, and rounded to nearest even. Zero keeps its sign, but in the fnuz formats, which have no minus
    zero: there it is 0. NaN of either sign becomes 0x7F, in the fnuz formats 0x80. It counts for no scale, nor do
    infinities. The scale is a multiplier: `x` is about `codes * scale`. It is `amax / largest number of the format`,
    divided in float32 and at least 2^-126, also in float8_e8m0fnu, which has 2^-127; where all is zero it is 1. Has no
    gradient.

    Args:
        x: `[..., K]` (`[..., N, K]` for granularity `128x128`) float64, float32, bfloat16 or float16.
        scale: of `scale_shape(x.shape, granularity)`, float32, float64 or float8_e8m0fnu: what to divide by instead
            of what `x` itself asks for; rounded to float32 first. Should be positive and finite. No value is refused,
            since that would wait for the device: others are divided by as IEEE 754 says, so by 0 all saturates but 0
            and NaN, which become NaN, a negative one turns signs, and NaN makes all NaN.
        dtype: of the codes: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
        granularity: what shares a scale: `tensor`, `row`, `1x128`, `128x128`, or `1x32` as in MXFP8.
        scale_dtype: of the scale if none is given: float32, float8_e8m0fnu for powers of two in 8 bits, or float64,
            which then holds a number of float32.
        scale_rounding: `none`; `up`, to the next power of two; or `down`, as in OCP Microscaling 1.0, where the
            largest numbers may saturate.
        stochastic: round up or down at random, so that the mean is `x / scale`: see `stochastic.round_stochastically`.
        seed: of what is drawn.
        offset: of what is drawn for the first element; the next one has the next offset.

    Returns:
        The codes, of `x`'s shape, and their scale, both contiguous.

    Raises:
        InputError: a shape, dtype or device does not fit.
        UnknownNameError: no such `granularity` or `scale_rounding`.

    Source: arXiv:2209.05433 (formats), OCP Microscaling 1.0 (`1x32`), DeepSeek-V3 (arXiv:2412.19437; 1x128 and
    128x128), Philox4x32-10 (Salmon et al., SC 2011).
    """
    form = FORMATS[dtype]
    wide = x.detach().to(torch.float32)
    if scale is None:
        scale = scale_of(largest(wide, granularity), form.most, scale_rounding).to(scale_dtype)
    else:
        scale = scale.detach().clone(memory_format=torch.contiguous_format)
    numbers, own = tiled(wide, scale.to(torch.float32), granularity)
    quotient = (numbers / own).reshape(x.shape).clamp(-form.most, form.most)
    if stochastic:
        quotient = round_stochastically(quotient, form, seed, offset)
    # One NaN for all: which sign a conversion gives it differs between dtypes and devices.
    # Not by `nan_to_num`, which torch-xla can't give NaN.
    return quotient.masked_fill(quotient.isnan(), math.nan).to(dtype).contiguous(), scale
