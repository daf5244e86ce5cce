"""`fp8.dequantize`: by shifted bits."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_fp8.scales import tiled

from .decode import decode


def forward(call: Call) -> Tensor:
    """As the reference, but for how codes are read."""
    wide = torch.float64 if call.dtype is torch.float64 else torch.float32
    numbers = decode(call.codes).to(wide)
    parts, scale = tiled(numbers, call.scale.to(wide), call.granularity)
    parts.mul_(scale)
    return numbers.to(call.dtype).contiguous()
