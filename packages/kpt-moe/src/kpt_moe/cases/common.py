"""What the case tables share."""

import torch
from torch import Tensor

#: Past what int16 and uint16 count, and past a grid's second dimension.
MANY = 70_001


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers in float64, of deviation `scale`."""
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale
