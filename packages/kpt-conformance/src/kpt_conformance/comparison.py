"""Comparing what a kernel gave with what is right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kpt_optimize.cases import Accuracy

from .tolerances import CANCELLED, PERTURBATION, RATIO, Tolerance, own_error, reference_bound, rounding


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave.

    Attributes:
        outputs: the tensors of the result, by place.
        gradients: of each differentiable argument, by name; None where autograd gave none.
        reduction: of an oracle: the longest sum that was taken, as far as it is known.
        terms: of an oracle: makes, by name, how large the terms are that meet in each element; None if nobody knows.
        exact: of an oracle: what must have the reference's bits.
        tolerances: of an oracle: of what is not held to the usual bounds, by name.
        leave: of an oracle: the part of its size by which a result may be off beyond rounding.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    reduction: int = 1
    terms: Callable[[], Mapping[str, Tensor]] | None = None
    exact: frozenset[str] | bool = False
    tolerances: Mapping[str, Accuracy] = field(default_factory=dict)
    leave: float = 0.0

    def is_exact(self, name: str) -> bool:
        """Return whether a result or gradient must have the reference's bits."""
        return self.exact if isinstance(self.exact, bool) else name in self.exact

    def named(self) -> dict[str, Tensor]:
        """Return every tensor, by what a message calls it."""
        gradients = {f"gradient of {name}": grad for name, grad in self.gradients.items() if grad is not None}
        return {**self.outputs, **gradients}


def outputs_of(result: object) -> dict[str, Tensor]:
    """Return the tensors of an op's result, by what a message calls them."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return {"result": leaves[0]} if len(leaves) == 1 else {f"result {i}": leaf for i, leaf in enumerate(leaves)}


def assert_right(
    got: Outcome, baseline: Outcome, oracle: Outcome, what: str = "", floor: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `AssertionError` unless `got` is about as near to `oracle` as `baseline` is.

    Args:
        got: of the kernel under test.
        baseline: of the reference in the kernel's dtype.
        oracle: of the reference in float64.
        what: what was special about the call, for the message.
        floor: by name, errors that are allowed in any case.
    """
    __tracebackhide__ = True  # a report leads with the check and the sentence
    try:
        _assert_right(got, baseline, oracle, floor or {})
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}" if what else str(error)) from None


def _assert_right(got: Outcome, baseline: Outcome, oracle: Outcome, floor: Mapping[str, Tensor]) -> None:
    __tracebackhide__ = True
    wrong = [name for name, grad in oracle.gradients.items() if (got.gradients.get(name) is None) != (grad is None)]
    assert not wrong, (
        f"gradients of {', '.join(wrong)} are {'missing' if got.gradients.get(wrong[0]) is None else 'not expected'}"
    )
    have, base, want = got.named(), baseline.named(), oracle.named()
    if oracle.leave:
        left = {name: _left(oracle.leave, out) for name, out in oracle.outputs.items() if out.is_floating_point()}
        floor = {name: floor[name] + each if name in floor else each for name, each in left.items()}
    assert have.keys() == want.keys(), f"gives {', '.join(have)}; expected {', '.join(want)}"

    dtypes = {name: _coarsest(name, got) for name in have}
    units = {name: rounding(dtype, oracle.reduction) for name, dtype in dtypes.items()}
    owns = {name: own_error(dtype, oracle.reduction) for name, dtype in dtypes.items()}

    def fault_of(name: str, explained: Tensor | None) -> str | None:
        if oracle.is_exact(name):
            return _inexact(have[name], base[name])
        tensors = have[name], base[name], want[name]
        return _fault(tensors, units[name], owns[name], _tolerance(oracle, name), explained)

    def faults(explained: Mapping[str, Tensor]) -> dict[str, str]:
        return {name: fault for name in want if (fault := fault_of(name, explained.get(name)))}

    found = faults(floor)
    if oracle.terms is not None and not all(map(oracle.is_exact, found)):
        # Asked for only here, since it costs a few runs of the oracle.
        found = faults({**_cancelled(oracle, {name: units[name] + owns[name] for name in units}), **floor})
    if found:
        raise AssertionError("\n".join(f"{name}: {fault}" for name, fault in found.items()))  # pytest repeats `assert`


def _left(part: float, out: Tensor) -> Tensor:
    """Return errors that are a part of a result's size: of each number's own, and of the usual one."""
    sizes = _wide(out).abs().nan_to_num_(0, 0, 0)
    return part * (sizes + 2 * sizes.square().mean().sqrt())


def _coarsest(name: str, got: Outcome) -> torch.dtype:
    """The dtype that a result is rounded to; of a gradient, if it is coarser, that in which its cotangents come."""
    dtypes = [got.named()[name].dtype]
    if name not in got.outputs:
        dtypes += [out.dtype for out in got.outputs.values()]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _tolerance(oracle: Outcome, name: str) -> Tolerance:
    own = oracle.tolerances.get(name)
    return RATIO if own is None else Tolerance(own.mean, own.maximum, RATIO.sampling, own.reason)


def _cancelled(oracle: Outcome, units: Mapping[str, float]) -> dict[str, Tensor]:
    """By name, the errors that rounding explains where terms cancel; zero where they don't."""
    assert oracle.terms is not None
    explained = {}
    for name, terms in oracle.terms().items():
        if name not in units:
            continue  # a gradient that was not asked for
        usual = _wide(oracle.named()[name]).square().mean().sqrt()
        explained[name] = units[name] * (terms.to("cpu", torch.float64) - CANCELLED * usual).clamp(min=0)
    return explained


def terms_of(oracle: Outcome, nearby: Sequence[Outcome]) -> dict[str, Tensor]:
    """Return how large the terms are that meet in each element, by name: from what small changes of arguments change.

    `nearby` are the outcomes for arguments that were changed by random `PERTURBATION`s of themselves.
    """
    named, others = oracle.named(), [outcome.named() for outcome in nearby]
    chosen = [name for name, tensor in named.items() if not tensor.is_floating_point()]
    if any(not torch.equal(other[name], named[name]) for other in others for name in chosen):
        return {}  # another choice is no rounding
    changes = {
        name: torch.stack([_wide(other[name]) - _wide(named[name]) for other in others])
        for name in named.keys() - {*chosen}
    }
    return {name: (each.square().mean(0).sqrt() / PERTURBATION).nan_to_num(0, 0, 0) for name, each in changes.items()}


def _wide(tensor: Tensor) -> Tensor:
    """Where torch computes with numbers of any dtype, of 8 bits too."""
    return tensor.detach().to("cpu", torch.float64)


def _different_bits(first: Tensor, second: Tensor) -> Tensor:
    """Of flattened tensors of one shape and dtype, which elements have other bits.

    A NaN is a NaN, but in 8 bits: there results are codes that others read, and which one stands for NaN is said.
    """
    flat = [t.detach().to("cpu").flatten().contiguous() for t in (first, second)]
    bits = [t.view(torch.uint8).view(t.numel(), -1) for t in flat]
    different = (bits[0] != bits[1]).any(1)
    if first.is_floating_point() and first.dtype.itemsize > 1:
        different &= ~(flat[0].float().isnan() & flat[1].float().isnan())
    return different


def _inexact(got: Tensor, baseline: Tensor) -> str | None:
    """How bits differ, or None."""
    if (got.shape, got.dtype) != (baseline.shape, baseline.dtype):
        return f"{got.dtype} {list(got.shape)}; expected {baseline.dtype} {list(baseline.shape)}"
    if got.numel() == 0:
        return None
    different = _different_bits(got, baseline)
    if not different.any():
        return None
    place = int(different.nonzero()[0])
    return (
        f"{int(different.sum())} of {got.numel()} elements have other bits than the reference's; the first at "
        f"{[int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)]}: "
        f"{_told(got.flatten()[place])}, expected {_told(baseline.flatten()[place])}"
    )


def _told(element: Tensor) -> str:
    """A number, and its code if that is what tells two apart."""
    coded = element.dtype.itemsize == 1 and element.is_floating_point() and element.float().isnan()
    return f"{element.item()} (0x{element.view(torch.uint8).item():02X})" if coded else str(element.item())


def _fault(
    tensors: tuple[Tensor, Tensor, Tensor], unit: float, own: float, tolerance: Tolerance, explained: Tensor | None
) -> str | None:
    """Return how a kernel's tensor is wrong beside the baseline's and the oracle's, or None.

    `unit` is what rounding explains, `own` the reference's own error at least, `explained` is allowed in any case.
    """
    got, baseline, oracle = tensors
    if got.shape != oracle.shape:
        return f"shape {list(got.shape)}; expected {list(oracle.shape)}"
    if got.dtype is not baseline.dtype:
        return f"{got.dtype}; expected {baseline.dtype}"
    if not oracle.is_floating_point():
        different = (got.to(oracle.device) != oracle).sum().item()
        return f"{different} of {oracle.numel()} elements differ" if different else None
    if oracle.numel() == 0:
        return None
    have, base, want = map(_wide, (got, baseline, oracle))
    floor = torch.zeros(()) if explained is None else explained.to("cpu", torch.float64)
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
        floor = floor if floor.dim() == 0 else floor[finite]
    slack = tolerance.slack(_draws(want))
    usual, most = _root_mean_square(want), want.abs().max().item()
    means = error.mean(), allowed.mean(), tolerance.mean, usual, _root_mean_square(floor)
    largest = error.max(), allowed.max(), tolerance.maximum, most, floor.max().item()
    for kind, (found, base_error, factor, size, least) in (("mean", means), ("largest", largest)):
        is_, reference = found.item(), max(base_error.item(), own * size)
        bound = factor * (reference + least) + slack * (reference + least + unit * size)
        if is_ > bound:
            worst = (_wide(got) - _wide(oracle)).abs().nan_to_num(0, 0, 0).argmax()
            place = [int(index) for index in torch.unravel_index(worst, oracle.shape)]
            return (
                f"{kind} error {is_:.3g} exceeds {bound:.3g} (the reference's own is {reference:.3g}); "
                f"worst at {place}: {got[tuple(place)].item():.6g}, expected {oracle[tuple(place)].item():.6g}"
            )
    return None


def _root_mean_square(values: Tensor) -> float:
    """Of float64 numbers whose squares may be too small for any."""
    most = values.abs().max().item()
    return most * torch.linalg.vector_norm(values / most).item() * values.numel() ** -0.5 if most else 0.0


def _draws(want: Tensor) -> int:
    """How many elements have an error of their own: rows of an expanded argument repeat each other's."""
    few = 4096  # of more elements, those that differ are many enough
    return want.unique().numel() if want.numel() <= few else want.numel()


def assert_reference_sound(baseline: Outcome, oracle: Outcome, dtype: torch.dtype, reduction: int) -> None:
    """Raise `AssertionError` if the reference, the measure of kernels, is itself further off than rounding explains."""
    __tracebackhide__ = True
    base = baseline.named()
    for name, tensor in oracle.named().items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        # A result or gradient may be rounded to less than the dtype of the run, and so may a gradient's cotangents.
        bound = max(reference_bound(each, reduction) for each in (dtype, _coarsest(name, baseline)))
        have, want = _wide(base[name]), _wide(tensor)
        error = (have - want).abs_().nan_to_num_(0, 0, 0).max().item()
        scale = want.nan_to_num(0, 0, 0).abs_().max().item()
        if error > bound * scale and oracle.terms is not None and name in (terms := oracle.terms()):
            scale = max(scale, terms[name].abs().max().item())  # where even the largest is a sum that cancels
        assert error <= bound * scale, (
            f"{name}: the reference's own error in {dtype} is {error:.3g}, {error / max(scale, 1e-300):.3g} of the "
            f"largest element; rounding explains {bound:.3g}"
        )


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether tensors of any dtype are bitwise equal, NaN included."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return first.numel() == 0 or not bool(_different_bits(first, second).any())


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    """Raise `AssertionError` unless all tensors are bitwise equal, NaN included."""
    __tracebackhide__ = True
    for name, tensor in first.items():
        assert same_bits(tensor, second[name]), f"{name}: {what}"
