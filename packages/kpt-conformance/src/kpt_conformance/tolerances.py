"""How far a result may be from the truth: the one table, a reason beside each row."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on a kernel's error against float64, relative to the reference's own error in the kernel's dtype.

    Attributes:
        mean: factor on the reference's mean error.
        maximum: factor on the reference's largest error.
        sampling: what may be added for `n` elements that differ, in units of the reference's error plus what rounding
            explains by itself (`rounding`), times `n ** -(1 / 3) * (1 + 1 / n)`.
        reason: why no less.
    """

    mean: float
    maximum: float
    sampling: float
    reason: str

    def slack(self, elements: int) -> float:
        """Return what `sampling` comes to for so many elements."""
        return float(self.sampling * elements ** -(1 / 3) * (1 + 1 / elements))


RATIO = Tolerance(
    mean=1.1,
    maximum=2.0,
    sampling=4.0,
    reason=(
        "Two right ways of computing one sum differ in the order of its terms, so their errors are two draws from one "
        "distribution. The mean of m independent errors varies by about m ** -0.5 of itself, four deviations of which "
        "are allowed. The errors in a matrix share those of its rows and columns: of n elements between n ** 0.5 (an "
        "outer product) and n are independent, and m = n ** (2 / 3) is taken. A few stray further, hence (1 + 1 / n). "
        "What rounding explains is added in the same proportion, since a reference of few elements may be exact by "
        "luck. At a million elements this leaves 1.14; a kernel that rounds once more than the reference does has at "
        "least 1.4."
    ),
)

#: By how much the terms of a sum must outweigh it before they are said to cancel. A softmax's gradient is
#: `(g - sum(g * p)) * p`: for a constant g it is zero, and what is left are the roundings of g * p, none of which is
#: small beside zero. The reference may have none by luck of its formula. So what cancels is measured: the arguments and
#: cotangents are changed by random parts of themselves, and the change of the float64 result, divided by the part, is
#: how large the terms are that meet in it; of random terms about the result itself. Where it is more than this many
#: times that, an error in proportion to it is allowed.
CANCELLED = 4.0
#: The part of themselves that arguments are changed by: small beside what curves, large beside float64's roundings.
PERTURBATION = 2.0**-26

#: Greatest error that the reference itself, the measure of every kernel, may have, in roundings of its dtype. An op of
#: several products rounds its intermediates, each by at most half an eps of its own size. Of all references and cases,
#: the worst in half precision was 5 roundings of the largest element (torch 2.13 on x86-64); twice that is allowed.
#: What the accumulator loses over a long sum comes on top.
REFERENCE_ROUNDINGS = 10.0


def own_error(dtype: torch.dtype, reduction: int) -> float:
    """Return what counts as the reference's own error, relative to the result, where none can be measured; else 0.

    In float64 the reference is the oracle, and its own error is zero: in its place stands the most that a reference may
    be off by. A kernel that passes through float32 anywhere rounds 2**29 times more coarsely than that.
    """
    return reference_bound(dtype, reduction) if dtype is torch.float64 else 0.0


def rounding(dtype: torch.dtype, reduction: int) -> float:
    """Return what rounding explains in a sum of `reduction` products, relative to the sum.

    Half a rounding of the result, or, if that is more, the square root of the sum's length times half a rounding of
    the accumulator, which is float32 at least (N. Higham, T. Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    eps = float(torch.finfo(dtype).eps)
    accumulator = min(eps, float(torch.finfo(torch.float32).eps))
    return max(eps, accumulator * math.sqrt(max(reduction, 1))) / 2


def reference_bound(dtype: torch.dtype, reduction: int) -> float:
    """Return the largest error of a reference relative to the largest element, for sums of `reduction` products."""
    return REFERENCE_ROUNDINGS * float(torch.finfo(dtype).eps) / 2 + rounding(dtype, reduction)
