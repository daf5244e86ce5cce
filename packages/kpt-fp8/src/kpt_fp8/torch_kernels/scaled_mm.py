"""`fp8.scaled_mm`: both operands are decoded, the second one part by part."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_fp8.scales import tiled

from .decode import decode
from .products import product


def forward(call: Call) -> Tensor:
    """In float32, or float64 where the result is."""
    wide = torch.float64 if call.out_dtype is torch.float64 else torch.float32
    rows = decode(call.a).to(wide)
    parts, own = tiled(rows, call.scale_a.to(wide), call.granularity_a)
    parts.mul_(own)
    scale = call.scale_b.t() if call.scale_b.dim() == 2 else call.scale_b
    out = product(rows, call.b.t(), scale.to(wide), call.granularity_b)
    return (out if call.bias is None else out.add_(call.bias)).to(call.out_dtype)
