"""`fp8.scaled_mm` by the vendor's library, through `torch._scaled_mm`: cuBLASLt and CUTLASS, or hipBLASLt.

Backends list its functions as kernels that require what a chip multiplies, and where it takes a scale for each row. The
limits are those of torch (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

import torch
from torch import Tensor

from kpt_core import Call, Refusal

#: By what a chip calls its 8-bit numbers: those of the Open Compute Project, and those of AMD's MI300.
OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
#: What results may be, by what shares a scale.
_RESULTS = {"tensor": (torch.bfloat16, torch.float16, torch.float32), "row": (torch.bfloat16,)}
#: The first ROCm whose library multiplies the numbers of the Open Compute Project.
_ROCM_OF_OCP = (6, 5)


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


def forward_of_rows(call: Call) -> Tensor:
    """Likewise, as a kernel of its own for chips of which not all take a scale for each row."""
    return forward(call)


def forward_of_fnuz(call: Call) -> Tensor:
    """Likewise, of the numbers of MI300."""
    return forward(call)


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the library on a chip that multiplies `OCP`, by tensor or by row; or None."""
    return _unsupported(call, OCP) or _too_old()


def unsupported_but_tensors(call: Call) -> Refusal | str | None:
    """Likewise on a chip that takes one scale for a tensor alone, as NVIDIA's before sm90."""
    if call.granularity_a == "row":
        return "a scale for each row, which another kernel takes, from sm90 on"
    return unsupported(call)


def unsupported_but_rows(call: Call) -> Refusal | str | None:
    """Likewise of what the other kernel leaves: a scale for each row."""
    if call.granularity_a != "row":
        return Refusal("scales by {a}; this kernel is for rows", a=call.granularity_a)
    return unsupported(call)


def unsupported_of_fnuz(call: Call) -> Refusal | str | None:
    """Likewise on a chip that multiplies `FNUZ`."""
    return _unsupported(call, FNUZ)


def _unsupported(call: Call, formats: tuple[torch.dtype, ...]) -> Refusal | str | None:
    a, b, by = call.a, call.b, call.granularity_a
    if a.dtype not in formats or b.dtype not in formats:
        has = " and ".join(map(short, formats))
        return Refusal("{a} by {b}; this kernel multiplies {has}", a=short(a.dtype), b=short(b.dtype), has=has)
    if by != call.granularity_b or by not in _RESULTS:
        return Refusal("scales by {a} and {b}; needs one for each tensor, or each row", a=by, b=call.granularity_b)
    if call.scale_a.dtype is not torch.float32 or call.scale_b.dtype is not torch.float32:
        return Refusal("scales in {a} and {b}; needs float32", a=call.scale_a.dtype, b=call.scale_b.dtype)
    if by == "row" and b.dtype is formats[1]:
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


def _too_old() -> Refusal | None:
    """Return why a ROCm multiplies no numbers of the Open Compute Project."""
    hip = torch.version.hip or ""
    if hip and tuple(map(int, hip.split(".")[:2])) < _ROCM_OF_OCP:
        return Refusal("ROCm {hip}; its library multiplies such numbers from 6.5 on", hip=hip)
    return None


def _adds(bias: Tensor, out: torch.dtype) -> bool:
    """Tell whether the library adds a bias itself: one of the result's type, of 16 bits."""
    return bias.dtype is out and out.itemsize == 2


def short(dtype: object) -> str:
    """Return a dtype's name without the module's."""
    return str(dtype).removeprefix("torch.")
