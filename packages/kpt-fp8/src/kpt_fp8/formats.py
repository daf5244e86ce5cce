"""The 8-bit floating-point formats, and what their bits mean."""

from dataclasses import dataclass

import torch

from kpt_core import InputError

#: What numbers are quantised to: the formats of arXiv:2209.05433, and those of AMD's MI300 (arXiv:2206.02915).
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NAMES_OF_FP8 = "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz"
#: What is quantised.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES_OF_DTYPES = "float64, float32, bfloat16 or float16"
#: What a scale may be: float32; float64 where all is widened to that; or a power of two as its exponent alone (OCP
#: Microscaling 1.0).
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.float64)
NAMES_OF_SCALES = "float32, float64 or float8_e8m0fnu"


@dataclass(frozen=True, slots=True)
class Format:
    """What the bits of an 8-bit format mean: one of sign, then those of the exponent, then those of the mantissa.

    `most` is the largest finite number. Codes without their sign from `special` on are NaN or infinite; it is 128 where
    minus zero is the one NaN.
    """

    dtype: torch.dtype
    most: float
    mantissa_bits: int
    bias: int
    special: int


#: By hand, since torch 2.13 has a wrong `finfo(float8_e5m2fnuz).eps`.
FORMATS = {
    form.dtype: form
    for form in (
        Format(torch.float8_e4m3fn, most=448.0, mantissa_bits=3, bias=7, special=0x7F),
        Format(torch.float8_e5m2, most=57344.0, mantissa_bits=2, bias=15, special=0x7C),
        Format(torch.float8_e4m3fnuz, most=240.0, mantissa_bits=3, bias=8, special=0x80),
        Format(torch.float8_e5m2fnuz, most=57344.0, mantissa_bits=2, bias=16, special=0x80),
    )
}


def require_fp8(op: str, name: str, dtype: torch.dtype) -> None:
    """Raise `InputError` unless `dtype` is an 8-bit format of numbers."""
    if dtype not in FORMATS:
        raise InputError(f"{op}: {name} must be {NAMES_OF_FP8}; got {dtype}")


def require_floating(op: str, name: str, dtype: torch.dtype) -> None:
    """Raise `InputError` unless `dtype` is one of `DTYPES`."""
    if dtype not in DTYPES:
        raise InputError(f"{op}: {name} must be {NAMES_OF_DTYPES}; got {dtype}")
