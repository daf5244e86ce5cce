"""What shares a scale while training, and where the scale comes from: `FP8Recipe`."""

from dataclasses import dataclass, replace

import torch

from kpt_core import InputError, UnknownNameError
from kpt_fp8.formats import require_fp8

#: What a layer escalates through: ever fewer numbers share a scale, until nothing is quantised any more.
LADDER = ("tensor", "row", "block", "none")
_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
_OWNER = "FP8Recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Recipe:
    """How a linear layer quantises its input, its weight and the gradient of its output.

    Attributes:
        granularity: what shares a scale.
            `tensor`: all numbers of a tensor; its codes serve both products that need it.
            `row`: a row, along what is summed over; the gradient of the weight is a product of what is not quantised,
            as in torchao's `rowwise_with_gw_hp`.
            `block`: 128 numbers of a row for input and gradient, 128 by 128 for the weight, as in DeepSeek-V3.
            `none`: nothing is quantised; the layer is an `nn.Linear`.
        delayed: take scales from the largest magnitudes of steps before, so that a number is read once
            (arXiv:2209.05433). For `tensor` alone. Without it, a tensor is read twice: for its scale, and to be
            quantised.
        history: how many steps are remembered.
        margin: delayed scales leave room for numbers 2^margin times as large as any that is remembered; at least 1, so
            that the largest code means overflow.
        gradient_margin: the same of gradients, which jump more from step to step. e5m2 has range to spare: 2^5 of it
            costs only what is below 1e-8 of the largest.
        dtype: of input and weight.
        gradient_dtype: of the gradient.

    Raises:
        InputError: a value is out of range, delayed scales are asked for without `tensor`, or input and gradient are
            both e5m2.
        UnknownNameError: no such granularity.
    """

    granularity: str = "tensor"
    delayed: bool = False
    history: int = 16
    margin: int = 1
    gradient_margin: int = 5
    dtype: torch.dtype = torch.float8_e4m3fn
    gradient_dtype: torch.dtype = torch.float8_e5m2

    def __post_init__(self) -> None:
        if self.granularity not in LADDER:
            raise UnknownNameError("granularity of training", self.granularity, LADDER)
        if self.delayed and self.granularity != "tensor":
            raise InputError(
                f"{_OWNER}: delayed scales are one for a tensor; got granularity={self.granularity!r}: give 'tensor', "
                "or delayed=False"
            )
        for name in ("history", "margin", "gradient_margin"):
            if getattr(self, name) < 1:
                raise InputError(f"{_OWNER}: {name} must be a positive integer; got {getattr(self, name)}")
        require_fp8(_OWNER, "dtype", self.dtype)
        require_fp8(_OWNER, "gradient_dtype", self.gradient_dtype)
        if self.dtype in _E5M2 and self.gradient_dtype in _E5M2:
            raise InputError(
                f"{_OWNER}: dtype or gradient_dtype must be float8_e4m3fn or float8_e4m3fnuz; got {self.dtype} and "
                f"{self.gradient_dtype}, which no device multiplies: give dtype=torch.float8_e4m3fn"
            )

    @property
    def quantises(self) -> bool:
        """Tell whether anything is quantised."""
        return self.granularity != "none"

    def escalated(self) -> "FP8Recipe | None":
        """The next recipe of the ladder, with scales that are not delayed; None after the last one."""
        place = LADDER.index(self.granularity) + 1
        return None if place == len(LADDER) else replace(self, granularity=LADDER[place], delayed=False)

    def __str__(self) -> str:
        return "delayed" if self.delayed else self.granularity


#: By name, recipes with the usual formats.
RECIPES = {
    **{granularity: FP8Recipe(granularity=granularity) for granularity in LADDER},
    "delayed": FP8Recipe(delayed=True),
}


def recipe_of(given: FP8Recipe | str) -> FP8Recipe:
    """A recipe, by itself or by its name."""
    if isinstance(given, FP8Recipe):
        return given
    if not isinstance(given, str):
        raise InputError(f"recipe must be an FP8Recipe or one of {', '.join(RECIPES)}; got {given!r}")
    if given not in RECIPES:
        raise UnknownNameError("FP8 recipe", given, RECIPES)
    return RECIPES[given]
