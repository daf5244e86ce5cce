"""Comparing what a kernel gave with what is right."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .tolerances import RATIO, Tolerance, reference_bound, rounding


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave.

    Attributes:
        outputs: the tensors of the result, by place.
        gradients: of each differentiable argument, by name; None where autograd gave none.
        reduction: the longest sum that was taken, as far as it is known.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    reduction: int = 1

    def named(self) -> dict[str, Tensor]:
        """Every tensor, by what a message calls it."""
        gradients = {f"gradient of {name}": grad for name, grad in self.gradients.items() if grad is not None}
        return {**self.outputs, **gradients}


def outputs_of(result: object) -> dict[str, Tensor]:
    """The tensors of an op's result, by what a message calls them."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return {"result": leaves[0]} if len(leaves) == 1 else {f"result {i}": leaf for i, leaf in enumerate(leaves)}


def assert_right(
    got: Outcome, baseline: Outcome, oracle: Outcome, what: str = "", tolerance: Tolerance = RATIO
) -> None:
    """Raise `AssertionError` unless `got` is about as near to `oracle` as `baseline` is.

    Args:
        got: of the kernel under test.
        baseline: of the reference in the kernel's dtype.
        oracle: of the reference in float64.
        what: what was special about the call, for the message.
        tolerance: the row of the table that applies.
    """
    try:
        _assert_right(got, baseline, oracle, tolerance)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}" if what else str(error)) from None


def _assert_right(got: Outcome, baseline: Outcome, oracle: Outcome, tolerance: Tolerance) -> None:
    wrong = [name for name, grad in oracle.gradients.items() if (got.gradients.get(name) is None) != (grad is None)]
    assert not wrong, (
        f"gradients of {', '.join(wrong)} are {'missing' if got.gradients.get(wrong[0]) is None else 'not expected'}"
    )
    have, base, want = got.named(), baseline.named(), oracle.named()
    assert have.keys() == want.keys(), f"gives {', '.join(have)}; expected {', '.join(want)}"
    faults = {name: _fault(have[name], base[name], want[name], oracle.reduction, tolerance) for name in want}
    text = "\n".join(f"{name}: {fault}" for name, fault in faults.items() if fault)
    if text:
        raise AssertionError(text)  # no `assert`: pytest would repeat it all


def _fault(got: Tensor, baseline: Tensor, oracle: Tensor, reduction: int, tolerance: Tolerance) -> str | None:
    if got.shape != oracle.shape:
        return f"shape {list(got.shape)}; expected {list(oracle.shape)}"
    if not oracle.is_floating_point():
        different = (got.to(oracle.device) != oracle).sum().item()
        return f"{different} of {oracle.numel()} elements differ" if different else None
    if oracle.numel() == 0:
        return None
    have, base, want = (t.detach().to("cpu", torch.float64) for t in (got, baseline, oracle))
    if all(bool(t.sum().isfinite()) for t in (have, base, want)):
        error, allowed = (have - want).abs_(), (base - want).abs_()
    else:
        # Where the reference overflows in its dtype, nothing is promised.
        compared = base.isfinite() | ~want.isfinite()
        infinite = have.isinf() | want.isinf()
        mismatched = compared & ((have.isnan() != want.isnan()) | (infinite & (have != want)))
        if mismatched.any():
            place = mismatched.nonzero()[0].tolist()
            return (
                f"{int(mismatched.sum())} of {want.numel()} elements are NaN or infinite where they should not be, or "
                f"the reverse; the first at {place}: {have[tuple(place)].item()}, expected {want[tuple(place)].item()}"
            )
        finite = compared & want.isfinite()
        if not finite.any():
            return None
        error, allowed, want = (have - want)[finite].abs(), (base - want)[finite].abs(), want[finite]
    slack = tolerance.slack(_draws(want))
    explained = rounding(got.dtype, reduction)
    bounds = {
        "mean": (
            error.mean().item(),
            allowed.mean().item(),
            tolerance.mean,
            explained * torch.linalg.vector_norm(want).item() * want.numel() ** -0.5,
        ),
        "largest": (
            error.max().item(),
            allowed.max().item(),
            tolerance.maximum,
            explained * torch.linalg.vector_norm(want, float("inf")).item(),
        ),
    }
    for kind, (is_, reference, factor, rounded) in bounds.items():
        bound = factor * reference + slack * (reference + rounded)
        if is_ > bound:
            worst = (got.to(oracle) - oracle).abs().nan_to_num(0, 0, 0).argmax()
            place = [int(index) for index in torch.unravel_index(worst, oracle.shape)]
            return (
                f"{kind} error {is_:.3g} exceeds {bound:.3g} (the reference's own is {reference:.3g}); "
                f"worst at {place}: {got[tuple(place)].item():.6g}, expected {oracle[tuple(place)].item():.6g}"
            )
    return None


def _draws(want: Tensor) -> int:
    """How many elements have an error of their own: rows of an expanded argument repeat each other's."""
    few = 4096  # of more elements, those that differ are many enough
    return want.unique().numel() if want.numel() <= few else want.numel()


def assert_reference_sound(baseline: Outcome, oracle: Outcome, dtype: torch.dtype, reduction: int) -> None:
    """Raise `AssertionError` if the reference, the measure of kernels, is itself further off than rounding explains."""
    bound = reference_bound(dtype, reduction)
    base = baseline.named()
    for name, tensor in oracle.named().items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        have, want = base[name].detach().to("cpu", torch.float64), tensor.detach().to("cpu", torch.float64)
        error = (have - want).abs_().nan_to_num_(0, 0, 0).max().item()
        scale = want.nan_to_num(0, 0, 0).abs_().max().item()
        assert error <= bound * scale, (
            f"{name}: the reference's own error in {dtype} is {error:.3g}, {error / max(scale, 1e-300):.3g} of the "
            f"largest element; rounding explains {bound:.3g}"
        )


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    """Raise `AssertionError` unless all tensors are bitwise equal, NaN included."""
    for name, tensor in first.items():
        other = second[name]
        same = tensor.shape == other.shape and tensor.dtype is other.dtype
        if same and tensor.is_floating_point():
            same = bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
        elif same:
            same = torch.equal(tensor, other)
        assert same, f"{name}: {what}"
