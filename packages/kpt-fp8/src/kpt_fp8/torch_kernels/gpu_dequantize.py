"""`fp8.dequantize` on GPUs, which cast codes as they read them: two passes, and no look at what is in host memory."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_fp8.scales import tiled


def forward(call: Call) -> Tensor:
    """Return the products in float32, float64 for that, each rounded as it is written."""
    wide = torch.float64 if call.dtype is torch.float64 else torch.float32
    numbers, scale = tiled(call.codes.to(wide), call.scale.to(wide), call.granularity)
    out = torch.empty(call.codes.shape, dtype=call.dtype, device=call.codes.device)
    torch.mul(numbers, scale, out=out.view(numbers.shape))
    return out
