"""How much error rounding explains: from the lengths of a module's sums and the dtype; docs/numerics.md derives it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: A run may err this many times as much as the recorder, on average and at the worst place.
MEAN_FACTOR, MAX_FACTOR = 1.1, 2.0
#: The mean absolute error of a rounding, or of a sum of many, in units of the largest that one can be.
MEAN_OF_ROUNDING = 1 / 3


def own_lengths(module: nn.Module, outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Over how many terms the sums go that a module computes itself, not by its children.

    Matrices, stacked ones of experts too, sum over the size that they contract, norms over their width, attention over
    `head_dim` for its scores and over the keys for its values.

    Args:
        module: any module.
        outputs: the tensors that it gave.
    """
    if isinstance(module, nn.Embedding):
        return ()
    lengths = []
    widths = []
    for parameter in module.parameters(recurse=False):
        if isinstance(module, nn.modules.conv._ConvNd):
            lengths += [parameter[0].numel()] if parameter.dim() > 1 else []
        elif parameter.dim() == 3:
            lengths.append(parameter.shape[1 if getattr(module, "is_transposed", False) else 2])
        elif parameter.dim() == 2:
            lengths.append(parameter.shape[-1])
        elif parameter.dim() == 1:
            widths.append(parameter.shape[0])
    if not lengths and widths:
        lengths.append(max(widths))  # a norm; beside a matrix it is a bias
    head_dim = getattr(module, "head_dim", None)
    if isinstance(head_dim, int) and any(output.dim() >= 3 for output in outputs):
        keys = next(output.shape[-2] for output in outputs if output.dim() >= 3)
        lengths += [head_dim, keys]
    return tuple(map(int, lengths))


@dataclass(frozen=True, slots=True)
class Rounding:
    """What was summed and rounded on the way to a result.

    Attributes:
        terms: how many terms went into the sums, of all modules on the way.
        roundings: how many times two runs may have rounded to the model's dtype at different places.
    """

    terms: int = 0
    roundings: int = 0

    def then(self, lengths: Sequence[int]) -> "Rounding":
        """After one more module: a rounding for each of its sums, or else one of its result."""
        return Rounding(self.terms + sum(lengths), self.roundings + max(1, len(lengths)))

    def backward(self) -> "Rounding":
        """On the way to a gradient: three times the products, and what they sum over tokens partly cancels."""
        return Rounding(3 * 3 * self.terms, 3 * 3 * self.roundings)

    def relative(self, dtype: torch.dtype) -> float:
        """The relative error that rounding explains; sums are taken in float32 at least."""
        unit = torch.finfo(dtype).eps / 2
        sums = min(unit, torch.finfo(torch.float32).eps / 2)
        return math.sqrt(self.roundings) * unit + math.sqrt(self.terms) * sums


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute errors of a tensor against float64, over the places where both are finite."""

    mean: float
    max: float

    @classmethod
    def of(cls, value: Tensor, reference: Tensor, where: Tensor) -> "Errors":
        """Compare the elements that a mask names."""
        if not where.any():
            return cls(0.0, 0.0)
        difference = (value.double() - reference.double()).abs()[where]
        return cls(difference.mean().item(), difference.max().item())

    def bound(self, reference: Tensor, where: Tensor, relative: float) -> "Errors":
        """What another run may err, if these are the recorder's errors."""
        if not where.any():
            return Errors(0.0, 0.0)
        values = reference.double()[where]
        # Three standard errors of the mean of so many errors: of four numbers, one run's may be right by luck.
        luck = 3 / math.sqrt(values.numel())
        return Errors(
            (MEAN_FACTOR + luck) * self.mean + MEAN_OF_ROUNDING * relative * values.square().mean().sqrt().item(),
            (MAX_FACTOR + luck) * self.max + relative * values.abs().max().item(),
        )

    def ratio(self, bound: "Errors") -> float:
        """How much of the bound is used; over 1 is too much."""
        return max(_part(self.mean, bound.mean), _part(self.max, bound.max))


def _part(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    return error / bound if bound > 0 else math.inf
