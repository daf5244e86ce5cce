"""What was called before leaves no trace: results are those of the arguments as they are now."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kpt_conformance.comparison import Outcome, assert_right
from kpt_conformance.extent import over
from kpt_conformance.tensors import fresh, tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments, Case

#: Rows that no case has.
_UNSEEN = 53


def _called(trial: Trial, leaves: Arguments, gradients: bool) -> Outcome:
    """The outcome for these very objects."""
    with trial.subject.chosen(), torch.set_grad_enabled(gradients):
        outputs = trial.outputs(leaves)
        found = trial.gradients(leaves, outputs) if gradients else {}
    return trial.outcome({name: out.detach().clone() for name, out in outputs.items()}, found)


@over(telling=("drawn",))
def changed_in_place(trial: Trial) -> None:
    """Arguments that were changed in place, in a way that no version counter shows, count with their new values."""
    given, others = trial.arguments(), tensors_of(trial.arguments(seed=1))
    names = [n for n, tensor in tensors_of(given).items() if others[n].shape == tensor.shape and tensor.numel()]
    if not names:
        pytest.skip("no argument has elements")
    # One after the other: whatever is kept of an argument is kept while all others stay as they are.
    steps = [("before any change", given)]
    for name in names:
        steps.append((f"after a change of {name} in place", _changed(steps[-1][1], name, others[name])))
    for which, change in (("last element", _nudged), ("element somewhere", _turned_somewhere)):
        steps.append((f"after a change of each one's {which} in place", with_tensors(steps[-1][1], change)))
    known = [(what, step) for what, step in steps if trial.table.specified is None or trial.table.specified(step)]
    truths = [(what, step, *trial.truth(step)) for what, step in known if trial.refusal(step) is None]
    for gradients in {False, trial.differentiable}:
        plain = trial if gradients else trial.forward_only()
        leaves = plain.leaves(with_tensors(given, lambda name, tensor: fresh(tensor)))
        for place, (what, step, baseline, oracle) in enumerate(truths):
            for _ in range(2 if place == 0 else 1):  # what is kept may be kept from the second call on
                _fill(leaves, step)
                got = _called(plain, leaves, gradients)
            if not gradients:
                baseline, oracle = (replace(each, gradients={}) for each in (baseline, oracle))
            assert_right(got, baseline, oracle, what + ("" if gradients else ", no gradient being wanted"))


def _changed(arguments: Arguments, name: str, new: Tensor) -> Arguments:
    """The arguments with new values in one, but for the ends of what is large: who looks there alone sees no change."""

    def inside(each: str, old: Tensor) -> Tensor:
        if each != name or old.dim() < 2 or old.shape[0] < 3 or not old.is_floating_point():
            return new if each == name else old
        return torch.cat((old[:1], new[1:-1], old[-1:]))

    return with_tensors(arguments, inside)


def _nudged(name: str, tensor: Tensor) -> Tensor:
    """Half the last element, where that is a number of which any other would do."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return tensor
    nudged = tensor.clone()
    if nudged.numel():
        nudged[(-1,) * nudged.dim()] *= 0.5
    return nudged


def _turned_somewhere(name: str, tensor: Tensor) -> Tensor:
    """Turn the sign of a large element that nobody who takes a few samples looks at."""
    signed = tensor.is_floating_point() and tensor.dtype is not torch.float8_e8m0fnu
    if not signed or tensor.numel() < 8:
        return tensor
    turned = tensor.double().flatten()
    sizes = turned.nan_to_num(0, 0, 0).abs()
    count = len(sizes)
    sizes[[0, 1, count // 4, count // 2, (count - 1) // 2, 3 * count // 4, count - 2, count - 1]] = -1
    turned[sizes.argmax()] *= -1
    return turned.view(tensor.shape).to(tensor.dtype)


def _fill(leaves: Arguments, values: Arguments) -> None:
    """Write values into the memory of tensors; their version counters stand still."""
    given = tensors_of(values)
    for name, tensor in tensors_of(leaves).items():
        tensor.data.copy_(given[name])


@over()
def after_other_shapes(trial: Trial) -> None:
    """Calls with other shapes, strides and dtypes leave no trace: in another dtype first, small, large, small again."""
    arguments = trial.arguments()
    truth = trial.truth(arguments)
    for what, other, called in _others(trial, arguments):
        if other.refusal(called) is None:
            other.assert_right(called, other.run(called), f"with {what}, after calls of {trial.case.name}")
            assert_right(trial.run(arguments), *truth, f"after a call with {what}")


def _others(trial: Trial, arguments: Arguments) -> Iterator[tuple[str, Trial, Arguments]]:
    """Calls that have little in common with a trial's."""

    def made(case: Case, dtype: torch.dtype) -> Arguments:
        return trial.table.arguments(case, dtype=dtype, device=trial.subject.device)

    def elements(case: Case) -> int:
        return sum(tensor.numel() for tensor in tensors_of(made(case, trial.dtype)).values())

    for dtype in [dtype for dtype in trial.subject.dtypes(trial.table) if dtype is not trial.dtype][-2:]:
        yield str(dtype), replace(trial, dtype=dtype), made(trial.case, dtype)
    largest = max((case for case in trial.table.cases if not (case.large or case.model)), key=elements)
    yield f"{largest.name} ({elements(largest)} elements)", replace(trial, case=largest), made(largest, trial.dtype)
    turned = with_tensors(arguments, lambda name, t: t.mT.contiguous().mT if t.dim() > 1 else t)
    yield "transposed arguments", trial, turned
