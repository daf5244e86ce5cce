"""Derivatives, first and second, and what a training forward keeps for them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_conformance.comparison import assert_right, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.tensors import cotangent_like, noted_in, require_addresses, tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_core import Kernel
from kpt_core.contract import TORCH, load


@over(kernels=False)
def derivatives(trial: Trial) -> None:
    """The reference's gradients are those of finite differences, in float64, and so are theirs."""
    arguments = trial.table.arguments(trial.case, dtype=torch.float64, device=trial.subject.device)
    wanted = {n: t.detach().requires_grad_() for n, t in tensors_of(arguments).items() if trial.wants_gradient(n, t)}
    if not wanted:
        pytest.skip("the op is not differentiable")
    if trial.table.estimated is not None and trial.table.estimated(arguments):
        pytest.skip("the gradient is an estimate, which no finite difference shows")

    def function(*leaves: Tensor) -> Any:
        given = dict(zip(wanted, leaves, strict=True))
        results = trial.subject.call(with_tensors(arguments, lambda name, tensor: given.get(name, tensor)))
        # A constant of infinity (the log-sum-exp of nothing) has finite differences of NaN.
        return tuple(each.masked_fill(each.isinf(), 0) for each in outputs_of(results).values())

    # In fast mode one direction is looked at, which torch draws: the same one in every run.
    with trial.subject.chosen(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.autograd.gradcheck(function, tuple(wanted.values()), nondet_tol=1e-12, fast_mode=True)
        torch.autograd.gradgradcheck(function, tuple(wanted.values()), nondet_tol=1e-12, fast_mode=True)


@over(references=False)
def second_derivatives(trial: Trial) -> None:
    """A gradient can be differentiated again, and gives the reference's second derivatives, whichever kernel ran."""
    if not trial.differentiable:
        pytest.skip("no gradients are promised")
    arguments = trial.arguments()
    assert_right(trial.run(arguments, twice=True), *trial.truth(arguments, twice=True), "second derivatives")


@over(dtypes=True, references=False)
def saved_tensors(trial: Trial) -> None:
    """A training forward keeps the arguments that gradients depend on, what the op declares, and no more memory."""
    op, kernel = trial.subject.op, trial.subject.kernel
    if kernel is None or kernel.backward is None:
        pytest.skip("autograd decides what is kept")
    require_addresses(trial.subject.device)
    arguments = trial.leaves(trial.arguments())
    kept: list[Tensor] = []
    with trial.subject.chosen(), torch.autograd.graph.saved_tensors_hooks(noted_in(kept), lambda tensor: tensor):
        results = outputs_of(trial.subject.call(arguments))
    read = {name: tensor for name, tensor in tensors_of(arguments).items() if name not in op.unread}
    allowed = read | (results if op.saves == "results" else {})
    others = _memory(kept).items() - _memory(allowed.values()).items()
    declared = sum(tensor.nbytes for tensor in _declared(trial, arguments))
    found = sum(size for _, size in others)
    assert found <= declared, (
        f"{found} bytes are kept for backward beside {', '.join(allowed)}; the op declares {declared}"
    )


def _memory(tensors: Any) -> dict[int, int]:
    """Address and size of the memory behind tensors."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _declared(trial: Trial, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """What the op's function says that a training forward saves beside arguments and results."""
    saves = trial.subject.op.saves
    if not callable(saves):
        return ()
    with torch.no_grad():
        return tuple(saves(trial.subject.record(arguments)))


@over(dtypes=True, references=False)
def interchangeable(trial: Trial) -> None:
    """It saves what the op declares: its backward runs after the declaration, another kernel's after its forward."""
    op, kernel = trial.subject.op, trial.subject.kernel
    if kernel is None or kernel.backward is None or not callable(op.saves):
        pytest.skip("nothing is saved whose meaning the op declares")
    arguments = trial.arguments()
    call = trial.subject.record(trial.leaves(arguments))
    declared = _declared(trial, trial.leaves(arguments))
    with torch.no_grad(), trial.subject.chosen():
        results, saved = kernel.load()(call)
        unused = kernel.load()(call._replace(needs=()))[1]
    assert unused == (), f"where no gradient is wanted it saves {len(unused)} tensors; expected an empty tuple"
    shapes = [[(tensor.dtype, list(tensor.shape)) for tensor in each] for each in (saved, declared)]
    assert shapes[0] == shapes[1], f"it saves {shapes[0]}; the op declares {shapes[1]}"
    outputs = outputs_of(results)
    place = itertools.count()  # as `Trial.gradients` counts
    given_back = results if isinstance(results, tuple) else (results,)
    pulls = [
        cotangent_like(out, next(place)) if out is not None and out.is_floating_point() else None for out in given_back
    ]
    tried = [("after what the op declares", kernel, declared)]
    tried += [(f"of {other.forward} after this forward", other, saved) for other in _others(trial)[:1]]
    truth = trial.truth(arguments)
    for what, other, given in tried:
        assert other.backward is not None
        with torch.no_grad(), trial.subject.chosen():
            found = load(other.backward)(call, given, *pulls)
        gradients = {n: found.get(n, torch.zeros_like(getattr(call, n))) for n in call.needs}
        assert_right(trial.outcome(outputs, gradients), *truth, f"backward {what}")


def _others(trial: Trial) -> list[Kernel]:
    """Kernels of backend `torch` that have a backward of their own and take the call."""
    offered = [k for k in kpt_core.backends()[TORCH].kernels() if k.op == trial.subject.op.name and k.backward]
    others = [replace(trial.subject, target=k.forward, backend=TORCH, kernel=k) for k in offered]
    leaves = trial.leaves(trial.arguments())
    return [s.kernel for s in others if s.kernel and s.kernel != trial.subject.kernel and s.refusal(leaves) is None]
