"""What the case tables share."""

import torch
from torch import Tensor

#: Past what int16 and uint16 count, and past a grid's second dimension.
MANY = 70_001
#: As wide as models are, and no power of two; a number past two of them, and past 1,024 experts.
WIDE, WIDER, MORE = 2_880, 4_097, 1_029


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers in float64, of deviation `scale`."""
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale
