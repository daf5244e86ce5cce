"""What the case tables share."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError
from kpt_core.errors import KptError
from kpt_moe._dtypes import wide_dtype
from kpt_moe._scales import SCALE_BLOCK, spread
from kpt_optimize.cases import Arguments, Case, WrongInput

#: Past what int16 and uint16 count, and past a grid's second dimension.
MANY = 70_001
#: As wide as models are, and no power of two; a number past two of them, and past 1,024 experts.
WIDE, WIDER, MORE = 2_880, 4_097, 1_029


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers in float64, of deviation `scale`."""
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def quantised(weight: Tensor, scheme: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of matrices `[..., outputs, inputs]`, and their scales. Cases run where kpt-fp8 is not installed."""
    outputs, inputs = weight.shape[-2:]
    wide, most = weight.to(wide_dtype(weight.dtype)), torch.finfo(dtype).max
    height, width = (1, inputs) if scheme == "row" else (SCALE_BLOCK, SCALE_BLOCK)
    whole = F.pad(wide.abs(), (0, -inputs % width, 0, -outputs % height))
    amax = whole.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax((-3, -1))
    scale = torch.where(amax == 0, 1, amax / most).float()
    codes = (wide / spread(spread(scale, inputs, -1), outputs, -2)).clamp(-most, most).to(dtype)
    return codes, scale.squeeze(-1) if scheme == "row" else scale


def case(name: str, *, model: bool = False, large: bool = False, **sizes: Any) -> Case:
    """Make a case of these sizes."""
    return Case(name=name, sizes=sizes, model=model, large=large)


def wrong(
    op: str,
    name: str,
    message: str,
    *,
    error: type[KptError] = InputError,
    sizes: Mapping[str, Any] | None = None,
    **changes: Callable[[Any], Any],
) -> WrongInput:
    """Make a call that the op refuses: how arguments change from right ones, and the message after the op's name."""

    def change(arguments: Arguments) -> Arguments:
        return {**arguments, **{name: changed(arguments.get(name)) for name, changed in changes.items()}}

    return WrongInput(name=name, change=change, message=f"{re.escape(op)}: {message}", error=error, sizes=sizes or {})
