"""`fp8.scaled_mm` of scales by blocks by cuBLASLt, through `torch._scaled_mm`: DeepSeek's, and Microscaling's.

The layouts of scales are those of cuBLAS's documentation, "Scaling factors layouts".
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import Call, Refusal

from .gpu_scaled_mm import short

_SIDE, _MX = 128, 32
#: The first CUDA whose cuBLAS takes scales of 128 numbers.
_CUDA = (12, 9)
#: K that leaves no gap in the scales of 128 by 128, which cuBLAS reads in fours: torch before 2.10 got that wrong.
_WHOLE_K = 4 * _SIDE
#: Devices whose library has no such scales; `meta` stands for a GPU that is not here.
_HOSTS = ("cpu",)
#: Rows that its products come in.
_ROWS = 4


def forward(call: Call) -> Tensor:
    """Multiply `a` with scales of 1 by 128 by `b` with those of 128 by 128, as DeepSeek-V3 has them."""
    rows = call.a.shape[0]
    over = -rows % _ROWS
    a, scale_a = (F.pad(each.view(torch.uint8), (0, 0, 0, over)).view(each.dtype) if over else each
                  for each in (call.a.contiguous(), call.scale_a))  # fmt: skip
    scale_a = scale_a.t().contiguous().t()  # [M, K / 128], M first
    scale_b = call.scale_b.t().contiguous().t()  # [K / 128, N / 128], K first
    return _product(call, a, scale_a, scale_b)[:rows]


def forward_of_mx(call: Call) -> Tensor:
    """Multiply numbers of which 32 share a power of two, as OCP Microscaling 1.0 has them."""
    return _product(call, call.a.contiguous(), swizzled(call.scale_a), swizzled(call.scale_b.t()))


def _product(call: Call, a: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    out, bias = call.out_dtype, call.bias
    b = call.b.t().contiguous().t()
    if bias is None:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out)
    product = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    return product.add_(bias).to(out)  # rounded once


def swizzled(scale: Tensor) -> Tensor:
    """Return scales `[rows, K / 32]` of float8_e8m0fnu as cuBLAS reads them: tiles of 128 by 4, each by 32, 4 and 4.

    Rows past the last, and scales past a row's last, are zeros: they scale nothing.
    """
    rows, columns = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % _SIDE))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # of rows: tile, quarter, place; of columns: tile, place
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(scale.dtype)


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for DeepSeek's scales, or None."""
    if (call.granularity_a, call.granularity_b) != ("1x128", "128x128"):
        return Refusal(
            "scales by {a} and {b}; this kernel is for 1x128 and 128x128", a=call.granularity_a, b=call.granularity_b
        )
    if call.scale_a.dtype is not torch.float32 or call.scale_b.dtype is not torch.float32:
        return Refusal("scales in {a} and {b}; needs float32", a=call.scale_a.dtype, b=call.scale_b.dtype)
    if call.a.shape[1] % _WHOLE_K:
        return Refusal("K = {inner}; needs a multiple of {whole}", inner=call.a.shape[1], whole=_WHOLE_K)
    cuda = tuple(map(int, (torch.version.cuda or "").split(".")[:2])) if torch.version.cuda else _CUDA
    if cuda < _CUDA:
        return Refusal("torch for CUDA {cuda}; cuBLAS takes such scales from 12.9 on", cuda=torch.version.cuda)
    return _unsupported(call)


def unsupported_but_mx(call: Call) -> Refusal | str | None:
    """Return why a call is not for Microscaling's scales, or None."""
    a, b = call.granularity_a, call.granularity_b
    powers = call.scale_a.dtype is call.scale_b.dtype is torch.float8_e8m0fnu
    if (a, b) != ("1x32", "1x32") or not powers:
        return Refusal(
            "scales by {a} and {b} in {scales}; this kernel is for 1x32 in float8_e8m0fnu", a=a, b=b,
            scales=short(call.scale_a.dtype),
        )  # fmt: skip
    if call.a.shape[1] % _MX:
        return Refusal("K = {inner}; needs a multiple of {whole}", inner=call.a.shape[1], whole=_MX)
    return _unsupported(call)


def _unsupported(call: Call) -> Refusal | str | None:
    a, b, out = call.a, call.b, call.out_dtype
    if a.dtype is not torch.float8_e4m3fn or b.dtype is not torch.float8_e4m3fn:
        return Refusal("{a} by {b}; this kernel multiplies float8_e4m3fn", a=short(a.dtype), b=short(b.dtype))
    if out not in (torch.bfloat16, torch.float32):
        return Refusal("a result in {out}; needs bfloat16 or float32", out=out)
    if a.device.type in _HOSTS:
        return "tensors in the host's memory; torch's library for CPUs has no such scales"
    if not a.numel() or not b.numel() or b.shape[1] % 16:
        return Refusal("{a} by {b}; needs N in multiples of 16, nothing empty", a=[*a.shape], b=[*b.shape])
    if a.storage_offset() % 16 or b.storage_offset() % 16:
        return "operands that start within 16 bytes; needs aligned ones"
    return None
