"""Which 8-bit weights a device multiplies."""

from functools import cache

import torch
from torch import Tensor

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def refusal_of_float8(x: Tensor, *weights: Tensor) -> str | None:
    """Why a device can't read these weights, as a sentence, or None."""
    if all(weight.dtype not in _FLOAT8 for weight in (x, *weights)) or not _too_old(x.device):
        return None
    return "8-bit numbers need sm89 or newer"


@cache
def _too_old(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9)
