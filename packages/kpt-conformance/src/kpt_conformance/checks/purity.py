"""What a call leaves behind: nothing in its arguments and earlier results; the same bits again."""

import itertools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from kpt_conformance.comparison import assert_right, assert_same_bits, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.tensors import noted_in, require_addresses, tensors_of, with_tensors
from kpt_conformance.trial import Trial

_THREADS = 4
#: More calls than a kernel has workspaces, if it hands out one after the other.
_RING = 8


@over(dtypes=True)
def inputs_unchanged(trial: Trial) -> None:
    """Neither forward nor backward changes the cotangent or an argument, but those that the op says it mutates.

    Not for a while either: autograd counts the changes, and other threads may read. No argument gets a `.grad`.
    """
    arguments = trial.arguments()
    before = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    versions = {name: tensor._version for name, tensor in tensors_of(arguments).items()}
    pulls: list[tuple[Tensor, Tensor]] = []

    def remember(pull: Tensor) -> Tensor:
        pulls.append((pull, pull.clone()))
        return pull

    trial.run(arguments, cotangent=remember)
    assert_same_bits(before, tensors_of(arguments), "the call changed this argument")
    for pull, copy in pulls:
        assert_same_bits({"cotangent": copy}, {"cotangent": pull}, "backward changed it")
    written = [name for name, tensor in tensors_of(arguments).items() if tensor._version != versions[name]]
    assert not written, f"the call wrote into {', '.join(written)}, though it put back what was there"
    for wanted in {False, trial.differentiable}:
        leaves = trial.leaves(arguments) if wanted else with_tensors(trial.leaves(arguments), lambda _, t: t.detach())
        with trial.subject.chosen():
            outputs = trial.outputs(leaves)
            if wanted:
                trial.gradients(leaves, outputs)
        for name, tensor in tensors_of(leaves).items():
            wants = wanted and trial.wants_gradient(name, tensor)
            assert tensor.requires_grad == wants, f"{name} wants a gradient afterwards, and did not before"
            assert not wants or tensor.grad is None, f"backward left a gradient in {name}.grad"


@over()
def no_aliasing(trial: Trial) -> None:
    """Results share no memory with arguments or each other, nor do a kernel's gradients, cotangents and saved tensors.

    Autograd's own backward may hand a cotangent on as a gradient; who writes a backward makes gradients anew.
    """
    require_addresses(trial.subject.device)
    arguments = trial.leaves(trial.arguments())
    saved: list[Tensor] = []
    pulls: list[Tensor] = []
    kernel = trial.subject.kernel
    own_backward = trial.differentiable and kernel is not None and kernel.backward is not None
    with trial.subject.chosen(), torch.set_grad_enabled(own_backward):
        with torch.autograd.graph.saved_tensors_hooks(noted_in(saved), lambda tensor: tensor):
            outputs = outputs_of(trial.subject.call(arguments))
        gradients = trial.gradients(arguments, outputs, noted_in(pulls)) if own_backward else {}
    made = {n: out.detach() for n, out in outputs.items()}
    with torch.no_grad(), trial.subject.chosen():  # perhaps by a path of its own
        unwanted = outputs_of(trial.subject.call(arguments))
    for results in (made, unwanted):
        _require_apart(results, {**results, **tensors_of(arguments)})
    found = {f"the gradient of {name}": gradient for name, gradient in gradients.items() if gradient is not None}
    _require_apart(
        found,
        {
            **found,
            **{f"the result {name}": out for name, out in made.items()},
            **tensors_of(arguments),
            **{f"cotangent {place}": pull for place, pull in enumerate(pulls)},
            **{f"saved tensor {place}": tensor for place, tensor in enumerate(saved)},
        },
    )


def _require_apart(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Raise `AssertionError` if one of the tensors shares memory with another of the others."""
    for (name, tensor), (other_name, other) in itertools.product(tensors.items(), others.items()):
        shared = tensor.numel() and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert name == other_name or not shared, f"{name} shares its memory with {other_name}"


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill memory that is not initialised with NaN."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@over(drawn="first", dtypes=True, telling=("owned", "load"))
def poisoned_outputs(trial: Trial) -> None:
    """Every element of result and gradients is written: memory that was NaN before has none of it afterwards."""
    arguments = trial.arguments()
    with _poisoned(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*determinis.*", UserWarning)
        got = trial.run(arguments)
    trial.assert_right(arguments, got)


@over(models="first", dtypes=True)
def repeatable(trial: Trial) -> None:
    """Repeated calls give the same bits, where that is claimed; references claim it on a CPU."""
    kernel = trial.subject.kernel
    claimed = kernel.deterministic if kernel else trial.subject.device.type == "cpu"
    if not claimed:
        pytest.skip("not claimed")
    arguments = trial.arguments()
    first = trial.run(arguments).named()
    for _ in range(4):
        again = trial.run(arguments).named()
        assert_same_bits(first, again, "repeated runs differ, though it claims to be deterministic")


@over(dtypes=True)
def called_twice(trial: Trial) -> None:
    """Two calls on the same tensors change twice what the op mutates, as two of the reference do."""
    if not trial.subject.op.mutates:
        pytest.skip("the op mutates nothing")
    arguments = trial.arguments()
    plain = trial.forward_only()
    truth = plain.truth(arguments, calls=2)
    assert_right(plain.run(arguments, calls=2), *truth, "the second of two calls on the same tensors")


@over(dtypes=True)
def double_use(trial: Trial) -> None:
    """A second call is right, and leaves the first one's result and graph alone; backward can be run twice."""
    arguments, others = trial.arguments(), trial.arguments(seed=1)
    baseline, oracle = trial.truth(arguments)
    if not trial.differentiable:
        with trial.subject.chosen(), torch.no_grad():
            first = trial.outputs(trial.leaves(arguments))
            kept = {name: out.clone() for name, out in first.items()}
            for _ in range(_RING):
                second = trial.outputs(trial.leaves(others))
        assert_same_bits(kept, first, "a second call changed the first one's result")
        trial.assert_right(others, trial.outcome(second, {}), "a second call of the same shapes")
        return
    with trial.subject.chosen():
        leaves = trial.leaves(arguments)
        first = trial.outputs(leaves)
        kept = {name: out.detach().clone() for name, out in first.items()}
        second_leaves = trial.leaves(others)
        second = trial.outputs(second_leaves)
        of_second = {n: g for n, g in trial.gradients(second_leaves, second).items() if g is not None}
        kept_second = {name: grad.clone() for name, grad in of_second.items()}
        for _ in range(_RING):
            trial.outputs(second_leaves)
        detached = {name: out.detach() for name, out in first.items()}
        assert_same_bits(kept, detached, "a second call changed the first one's result")
        once = trial.gradients(leaves, first, retain_graph=True)
        kept_once = {name: grad.clone() for name, grad in once.items() if grad is not None}
        twice = trial.gradients(leaves, first)
    assert_same_bits(kept_second, of_second, "another call's backward changed it")
    trial.assert_right(others, trial.outcome(second, of_second), "a second call of the same shapes")
    got = trial.outcome(first, {**once, **kept_once})
    assert_right(got, baseline, oracle, "backward after another call")
    assert_right(trial.outcome(first, twice), baseline, oracle, "the second backward")
    assert_same_bits(kept_once, {n: g for n, g in once.items() if g is not None}, "the second backward changed it")


@over()
def threads(trial: Trial) -> None:
    """Calls from several Python threads at once don't disturb one another."""
    seeds = range(_THREADS)
    prepared = [(arguments := trial.arguments(seed), trial.truth(arguments)) for seed in seeds]
    faults: list[str] = []
    start = threading.Barrier(_THREADS)

    def work(seed: int) -> None:
        arguments, (baseline, oracle) = prepared[seed]
        try:
            start.wait()
            for _ in range(3):
                assert_right(trial.run(arguments), baseline, oracle)
        except Exception as error:  # the thread's own failure must reach the test
            faults.append(f"thread {seed}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults, "\n".join(faults)
