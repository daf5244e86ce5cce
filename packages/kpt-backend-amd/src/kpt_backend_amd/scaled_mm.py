"""`fp8.scaled_mm` by hipBLASLt, through torch: each chip multiplies its own 8-bit numbers.

The limits are those of `torch._scaled_mm` in a torch for ROCm (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from functools import cache

import torch
from torch import Tensor

from kpt_core import Call, Refusal

from .chips import capabilities_of, chip_name

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
#: What results may be, by what shares a scale.
_RESULTS = {"tensor": (torch.bfloat16, torch.float16, torch.float32), "row": (torch.bfloat16,)}


def forward(call: Call) -> Tensor:
    """Multiply, in the one layout that every version of the library takes: both operands with K contiguous."""
    scale_a, scale_b, out, bias = call.scale_a.contiguous(), call.scale_b.contiguous(), call.out_dtype, call.bias
    if call.granularity_a == "row":
        scale_a, scale_b = scale_a.unsqueeze(1), scale_b.unsqueeze(0)
    own = bias is None or _adds(bias, out)
    product = torch._scaled_mm(
        call.a.contiguous(),
        call.b.t().contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias.contiguous() if own and bias is not None else None,
        out_dtype=out if own else torch.float32,
    )
    return product if own else product.add_(bias).to(out)  # rounded once


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for hipBLASLt, or None."""
    a, b, by = call.a, call.b, call.granularity_a
    chip = _chip(a.device)
    served = _served(chip, torch.version.hip or "")
    if a.dtype not in served or b.dtype not in served:
        has = " and ".join(map(_short, served)) or "no 8-bit numbers"
        return Refusal("{a} by {b}; {chip} multiplies {has}", a=_short(a.dtype), b=_short(b.dtype), chip=chip, has=has)
    if by != call.granularity_b or by not in _RESULTS:
        return Refusal("scales by {a} and {b}; needs one for each tensor, or each row", a=by, b=call.granularity_b)
    if call.scale_a.dtype is not torch.float32 or call.scale_b.dtype is not torch.float32:
        return Refusal("scales in {a} and {b}; needs float32", a=call.scale_a.dtype, b=call.scale_b.dtype)
    if by == "row" and b.dtype in _E5M2:
        return "a scale for each row, and b is e5m2; needs e4m3"
    out = call.out_dtype
    if out not in _RESULTS[by]:
        return Refusal("a result in {out} of scales by {by}; needs bfloat16", out=out, by=by)
    if by == "row" and call.bias is not None and not _adds(call.bias, out):
        return Refusal("a bias in {bias}, and scales by row; needs bfloat16", bias=call.bias.dtype)
    if not a.numel() or not b.numel() or a.shape[1] % 16 or b.shape[1] % 16:
        return Refusal("{a} by {b}; needs K and N in multiples of 16, nothing empty", a=[*a.shape], b=[*b.shape])
    if a.storage_offset() % 16 or b.storage_offset() % 16:
        return "operands that start within 16 bytes; needs aligned ones"
    return None


def _adds(bias: Tensor, out: torch.dtype) -> bool:
    """Tell whether the library adds a bias itself: one of the result's type, of 16 bits."""
    return bias.dtype is out and out.itemsize == 2


@cache
def _chip(device: torch.device) -> str:
    return chip_name(torch.cuda.get_device_properties(device).gcnArchName) if device.type == "cuda" else device.type


@cache
def _served(chip: str, hip: str) -> tuple[torch.dtype, ...]:
    """Return the formats that a chip multiplies with a ROCm; before 6.5 torch has the fnuz forms alone."""
    found = (dtype for dtype in _FORMATS if f"fp8_{_short(dtype).removeprefix('float8_')}" in capabilities_of(chip))
    new = tuple(map(int, hip.split(".")[:2])) >= (6, 5) if hip else False
    return tuple(dtype for dtype in found if new or _short(dtype).endswith("fnuz"))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
