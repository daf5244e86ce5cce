"""8-bit codes to float32 by way of float16, whose bits are a code's, shifted: several times faster than `Tensor.to`."""

import torch
from torch import Tensor

from kpt_fp8.formats import FORMATS, Format

#: By format: a code times what has its bits where float16 has them, which of them stay, and what the float16 number
#: lacks as a factor. The largest exponent of float8_e5m2fnuz is infinity in float16: its codes are looked up.
_HALF: dict[torch.dtype, tuple[int, int, float]] = {
    torch.float8_e4m3fn: (1 << 7, ~0x4000, 2.0**8),
    torch.float8_e4m3fnuz: (1 << 7, ~0x4000, 2.0**7),
    torch.float8_e5m2: (1 << 8, -1, 1.0),
}
#: Numbers that are decoded at once: what they become on the way stays in a core's cache.
_AT_ONCE = 1 << 18


def decode(codes: Tensor) -> Tensor:
    """Return the numbers of 8-bit codes in host memory, of any strides, in float32, exact; NaN and infinity too."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    decode_into(out, codes, exact=True)
    return out


def lacking(dtype: torch.dtype) -> float:
    """The power of two by which what `decode_into` leaves is too small, where it need not be exact."""
    return _HALF[dtype][2] if dtype in _HALF else 1.0


def decode_into(out: Tensor, codes: Tensor, *, exact: bool = False) -> None:
    """Write the numbers of codes into `out`, contiguous: `exact`, or divided by `lacking`, which is faster."""
    if codes.numel() == 0:
        return
    if codes.is_contiguous():
        codes, out = codes.view(-1), out.view(-1)
    step = max(_AT_ONCE // codes[0].numel(), 1)
    form = FORMATS[codes.dtype]
    bits = torch.empty((min(step, len(codes)), *codes.shape[1:]), dtype=torch.int16)
    for part, numbers in zip(codes.split(step), out.split(step), strict=True):
        if form.dtype not in _HALF or _has_special(part, form):
            values = torch.arange(256, dtype=torch.uint8).view(form.dtype).to(torch.float32)
            numbers.copy_(values[part.view(torch.uint8).to(torch.int32)])
            factor = 1.0 if exact else 1.0 / lacking(form.dtype)
        else:
            shift, mask, factor = _HALF[form.dtype]
            halves = bits[: len(part)].copy_(part.view(torch.int8)).mul_(shift)  # torch shifts one by one
            if mask != -1:
                halves.bitwise_and_(mask)
            numbers.copy_(halves.view(torch.float16))
            factor = factor if exact else 1.0
        if factor != 1.0:
            numbers.mul_(factor)


def _has_special(codes: Tensor, form: Format) -> bool:
    """Tell whether there is a code of NaN which float16 would take for a number."""
    signed = codes.view(torch.int8)
    if form.special == 0x80:
        return bool(signed.min() == -128)
    return form.special == 0x7F and bool(signed.max() == 0x7F or codes.view(torch.uint8).max() == 0xFF)
