"""What a call is given and asked for: parameters, tensors that are no leaves or share memory, some of the gradients."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kpt_conformance.comparison import Outcome, assert_right, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.tensors import tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

Way = tuple[str, Trial, Arguments, Callable[[Arguments], Any]]


@over()
def objects(trial: Trial) -> None:
    """Results don't depend on which objects hold the arguments, which gradients are asked for, or who asks.

    Parameters count with their values after an optimiser's step, and after their data were exchanged; gradients reach
    through tensors that are no leaves; two arguments may share memory, or be one tensor; gradients may be asked of all
    but one argument, of one result alone, or in another thread.
    """
    arguments = trial.arguments()
    for what, asked, given, call in _ways(trial, arguments):
        if asked.takes(given):
            got, (baseline, oracle) = asked.run(given, call=call), asked.truth(given, call=call)
            if "alone" in what:  # whether a gradient that is zero anyway is there is the kernel's affair
                got, baseline, oracle = (_without_none(each, given) for each in (got, baseline, oracle))
            assert_right(got, baseline, oracle, what)
    _require_steps(trial, arguments)
    if trial.differentiable:
        _require_other_thread(trial, arguments)


def _without_none(outcome: Outcome, arguments: Arguments) -> Outcome:
    given = tensors_of(arguments)
    found = {name: torch.zeros_like(given[name]) if g is None else g for name, g in outcome.gradients.items()}
    return replace(outcome, gradients=found)


def _ways(trial: Trial, arguments: Arguments) -> Iterator[Way]:
    """Calls with other objects of the same or other values, and what is asked of them."""
    op = trial.subject.op
    wanted = [name for name, tensor in tensors_of(arguments).items() if trial.wants_gradient(name, tensor)]
    if trial.differentiable:

        def inner(given: Arguments) -> Any:
            return op(**with_tensors(given, lambda _, tensor: tensor.clone() if tensor.requires_grad else tensor))

        yield "with arguments that are no leaves", trial, arguments, inner
        if len(wanted) > 2:
            for name in wanted:
                rest = tuple(each for each in wanted if each != name)
                asked = replace(trial, table=replace(trial.table, gradients=rest))
                yield f"with every gradient but that of {name}", asked, arguments, lambda given: op(**given)
        with trial.subject.chosen(), torch.no_grad():
            count = sum(out.is_floating_point() for out in outputs_of(op(**trial.leaves(arguments))).values())
        for place in range(count if count > 1 else 0):
            yield f"with gradients of result {place} alone", trial, arguments, _one_of(op, place)
    # A leaf of its own of each, but one memory: views of a fused projection, keys that are the values too.
    for one, other in _alike(trial, arguments):
        first, second = arguments[one], arguments[other]
        memory = torch.stack((first, second))
        halves = with_tensors(arguments, lambda name, tensor: {one: memory[0], other: memory[1]}.get(name, tensor))  # noqa: B023
        yield f"with {one} and {other} in one memory", trial, halves, lambda given: op(**given)
        same = {**arguments, other: first}
        yield f"with {other} in the memory of {one}", trial, same, lambda given: op(**given)
        yield f"with one tensor as {one} and {other}", trial, same, _twice(op, one, other)


def _one_of(op: Any, place: int) -> Callable[[Arguments], Tensor]:
    return lambda given: [out for out in outputs_of(op(**given)).values() if out.is_floating_point()][place]


def _twice(op: Any, one: str, other: str) -> Callable[[Arguments], Any]:
    return lambda given: op(**{**given, other: given[one]})


def _alike(trial: Trial, arguments: Arguments) -> list[tuple[str, str]]:
    """Return pairs of arguments that could be one tensor: of one shape and dtype, and never written to."""
    read = [(name, tensor) for name, tensor in tensors_of(arguments).items() if not trial.mutates(name)]
    return [
        (one, other)
        for (one, first), (other, second) in itertools.combinations(read, 2)
        if first.shape == second.shape and first.dtype is second.dtype and first.numel() and first.is_floating_point()
    ]


def _require_steps(trial: Trial, arguments: Arguments) -> None:
    """Raise `AssertionError` unless parameters count with their values of now, whatever was called before."""
    __tracebackhide__ = True
    held: dict[str, nn.Parameter] = {}
    for name, tensor in tensors_of(arguments).items():
        if tensor.is_floating_point() and not trial.mutates(name):
            held[name] = nn.Parameter(tensor.detach().clone(), requires_grad=trial.wants_gradient(name, tensor))
    stepped = [name for name, tensor in held.items() if tensor.dtype.itemsize > 1]

    def now() -> Arguments:
        return with_tensors(arguments, lambda name, tensor: held[name].detach() if name in held else tensor)

    def step() -> None:
        with torch.no_grad():
            for name in stepped:
                held[name].mul_(0.75)

    def exchange() -> None:
        for name in stepped:
            held[name].data = held[name].detach() * 1.25

    # Twice before: what is kept may be kept from the second call on.
    for what, change in (("", None), ("again", None), ("after a step", step), ("with other data", exchange)):
        if change is not None:
            change()
        if not trial.takes(now()):
            return

        def call(given: Arguments) -> Any:
            leaves = with_tensors(given, lambda name, tensor: held.get(name, tensor))
            return trial.subject.op(**leaves)

        with trial.subject.chosen(), torch.set_grad_enabled(trial.differentiable):
            leaves = with_tensors(trial.leaves(now()), lambda name, tensor: held.get(name, tensor))
            outputs = trial.outputs(leaves, call)
            found = trial.gradients(leaves, outputs) if trial.differentiable else {}
        assert_right(trial.outcome(outputs, found), *trial.truth(now()), f"with parameters {what}".strip())


def _require_other_thread(trial: Trial, arguments: Arguments) -> None:
    """Raise `AssertionError` unless gradients that another thread asks for are right."""
    __tracebackhide__ = True
    leaves = trial.leaves(arguments)
    with trial.subject.chosen():
        outputs = trial.outputs(leaves)
    found: list[Any] = []

    def work() -> None:
        try:
            with trial.subject.chosen():
                found.append(trial.gradients(leaves, outputs))
        except Exception as error:  # the thread's own failure must reach the test
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise AssertionError(f"backward in another thread: {type(found[0]).__name__}: {found[0]}")
    assert_right(trial.outcome(outputs, found[0]), *trial.truth(arguments), "backward in another thread")
