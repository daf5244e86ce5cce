"""What the case tables share."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, KptError
from kpt_fp8.formats import SCALE_DTYPES
from kpt_fp8.scales import BLOCKS, scale_shape
from kpt_optimize.cases import Arguments, Sizes, WrongInput

#: Past what int16 and uint16 count, and past a grid's second dimension.
MANY = 70_001
#: As wide as models are, and no power of two.
WIDE, WIDER = 2_880, 4_097
#: Beside them the rows of decoding and more squares than two by two, and widths of models.
SIZES = {"rows": Sizes(many=MANY, usual=(1, 4, 16, 65, 641)), "inner": Sizes(many=WIDER, usual=(1_153, WIDE))}
COLUMNS = Sizes(many=WIDE, usual=(130, 769))
#: Dimensions before rows, where an op takes any: none, one, two.
STACKS: tuple[tuple[int, ...], ...] = ((), (2,), (3, 2))
#: Values that a domain has of each option.
GRANULARITIES = tuple(BLOCKS)
SCALES = SCALE_DTYPES[:2]


def affordable(values: Mapping[str, Any]) -> bool:
    """Return whether arguments have no more than millions of numbers."""
    rows, inner, columns = (values.get(name, 1) for name in ("rows", "inner", "columns"))
    stacked = math.prod(values.get("stacked", ()))
    return bool(stacked * rows * inner + inner * columns + rows * columns <= 3_500_000)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers in float64, of deviation `scale`."""
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def codes(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Random codes of every size that the dtype has, its subnormal numbers too; none is NaN or infinite."""
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 10
    numbers = normal(generator, *shape, scale=torch.finfo(dtype).max / 4) * torch.exp2(-exponents)
    return numbers.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def scales(
    generator: torch.Generator,
    shape: Sequence[int],
    granularity: str,
    like: torch.dtype,
    dtype: torch.dtype,
    most: float = 4.0,
) -> Tensor:
    """Draw scales between a half and three halves of those that give format `like` the range of `most`.

    Of exponents alone there would be two codes: they are up to three less or more.
    """
    drawn = torch.rand(scale_shape(shape, granularity), generator=generator, dtype=torch.float64) + 0.5
    if dtype is torch.float8_e8m0fnu:
        drawn = drawn * torch.exp2(torch.randint(-3, 4, drawn.shape, generator=generator).double())
    return (drawn / torch.finfo(like).max * most).float().to(dtype)


def wrong_input(op: str, name: str, message: str, *, error: type[KptError] = InputError, **changed: Any) -> WrongInput:
    """Describe a call that an op must refuse: of right arguments some are changed, to values or by functions.

    The message of an `InputError` begins with the op's name.
    """

    def change(arguments: Arguments) -> Arguments:
        made = {key: value(arguments) if callable(value) else value for key, value in changed.items()}
        return {**arguments, **made}

    pattern = rf"{re.escape(op)}: {message}" if error is InputError else message
    return WrongInput(name=name, change=change, message=pattern, error=error)
