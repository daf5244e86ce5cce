"""`fp8.scaled_mm`, and the calls that it refuses."""

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_core import Call, Refusal

from .linear import FORMATS

#: Scales of a tile's rows lie in VMEM whole.
_MOST_BLOCKS = 1024
_GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    for matrix, scale, granularity in (
        (call.a, call.scale_a, call.granularity_a),
        (call.b, call.scale_b, call.granularity_b),
    ):
        if matrix.dtype not in FORMATS:
            return Refusal("a matrix in {dtype}; torch_xla holds float8_e4m3fn and float8_e5m2", dtype=matrix.dtype)
        if scale.dtype is not torch.float32:
            return Refusal("scales in {dtype}; this kernel takes float32", dtype=scale.dtype)
        if granularity not in _GRANULARITIES:
            return Refusal("granularity {name}; this kernel takes tensor, row, 1x128 and 128x128", name=granularity)
    if call.out_dtype not in (torch.float32, torch.bfloat16):
        return Refusal("results in {dtype}; this kernel gives float32 and bfloat16", dtype=call.out_dtype)
    if 0 in (*call.a.shape, call.b.shape[1]):
        return "tensors without elements; needs some"
    if call.a.shape[1] > 128 * _MOST_BLOCKS:
        return Refusal("K of {inner}; this kernel takes {most} at most", inner=call.a.shape[1], most=128 * _MOST_BLOCKS)
    return None


def forward(call: Call) -> Tensor:
    """Return `[M, N]` of `out_dtype`."""
    granularities = call.granularity_a, call.granularity_b
    given = call.a, call.b, call.scale_a, call.scale_b, call.bias
    name = str(call.out_dtype).removeprefix("torch.")
    found: Tensor = jax("scaled_mm:forward", *given, granularities=granularities, out_dtype=name)
    return found
