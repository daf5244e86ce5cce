"""`fp8.quantize` of numbers whose scale is asked for, and the calls that it refuses."""

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_core import Call, Refusal

from .linear import FORMATS

#: A row lies in VMEM whole, as float32, with its codes.
_MOST = 32768


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    x = call.x
    if call.dtype not in FORMATS:
        return Refusal("codes in {dtype}; torch_xla holds float8_e4m3fn and float8_e5m2", dtype=call.dtype)
    if call.scale is not None:
        return "a scale is given; XLA divides by it in one reading, too"
    if call.granularity == "1x32":
        return "granularity 1x32; this kernel takes tensor, row, 1x128 and 128x128"
    if call.granularity == "128x128" and x.dim() > 2:
        return Refusal("{dims} dimensions; this kernel has square blocks of two", dims=x.dim())
    if call.scale_dtype is not torch.float32 or call.scale_rounding == "down":
        return Refusal(
            "scales in {dtype}, rounded {how!r}; this kernel gives float32, as they are or rounded up",
            dtype=call.scale_dtype, how=call.scale_rounding,
        )  # fmt: skip
    if call.stochastic:
        return "stochastic rounding; this kernel rounds to nearest"
    if not x.numel() or not x.dim():
        return "no numbers; needs some"
    if x.shape[-1] > _MOST and call.granularity != "tensor":
        return Refusal("rows of {size}; this kernel takes {most} at most", size=x.shape[-1], most=_MOST)
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the codes and their scale."""
    x, name = call.x, str(call.dtype).removeprefix("torch.")
    codes, scale = jax(
        "quantize:forward", x.reshape(-1, x.shape[-1]), format=name, granularity=call.granularity,
        rounding=call.scale_rounding,
    )  # fmt: skip
    of_rows = call.granularity in ("row", "1x128")
    return codes.view(x.shape), scale.view(*x.shape[:-1], *scale.shape[1:]) if of_rows else scale
