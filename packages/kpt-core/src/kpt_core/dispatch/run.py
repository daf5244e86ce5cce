"""Run what was chosen; a kernel that raises gives way to the next one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kpt_core.contract import TORCH, Call, Op
from kpt_core.selection import REFERENCE, Selection

from .autograd import attach, copied
from .candidates import Candidate, Candidates, choose, selection_of
from .containment import checked, fall_back, is_contained, raise_of_call, warn_of_failures
from .settings import OBSERVERS, Scope, scoped, tell_observers

Run = Callable[[Op[..., Any], Candidate | None, Call], Any]
Failed = tuple[tuple[Candidate, Exception], ...]


def run(op: Op[..., Any], candidate: Candidate | None, call: Call) -> Any:
    """Return the results of a kernel, or of the reference, tied to autograd where a gradient is needed."""
    if op.mutates:
        bump(op, call)
        if call.needs:
            return _run_on_copies(op, candidate, call)
    if candidate is None:
        return op.run_reference(call)
    if not call.needs:
        output = candidate.forward(call)
        if False not in candidate.agrees:
            checked(op, candidate, call, output)
            candidate.agrees.add(False)
        return output[0] if candidate.saves else output
    if candidate.kernel.differentiable:
        return candidate.forward(call)
    return attach(op, candidate, call, *_run_for_backward(op, candidate, call))


#: Calls that look different, for which an op keeps what a kernel prepared: decoding makes new ones as it goes on.
MOST_PREPARED = 512


def prepare(op: Op[..., Any], candidate: Candidate, known: dict[Any, Any], key: tuple[Any, ...], call: Call) -> Any:
    """Run a kernel that accepts a call and wants no gradient, by what it prepares for all that look alike."""
    function = None if candidate.prepare is None or candidate.failures else candidate.prepare(call)
    if function is None:
        results = candidate.forward(call)
        results = results[0] if candidate.saves else results
    else:
        results = function(*call[:-2])
        checked(op, candidate, call, (results, ()) if candidate.saves else results)
    if len(known) >= MOST_PREPARED:
        known.clear()
    known[key] = function or False
    return results


def _run_for_backward(op: Op[..., Any], candidate: Candidate, call: Call) -> tuple[Any, tuple[Tensor, ...]]:
    with torch.no_grad():
        output = candidate.forward(call)
    if True not in candidate.agrees:
        checked(op, candidate, call, output)
        candidate.agrees.add(True)
    return output if candidate.saves else (output, ())


def bump(op: Op[..., Any], call: Call) -> None:
    """Tell autograd that a call changes arguments: what a kernel writes past torch must not go unseen."""
    torch._C._increment_version([value for name in op.written if (value := getattr(call, name)) is not None])


def _run_on_copies(op: Op[..., Any], candidate: Candidate | None, call: Call) -> Any:
    """Run an op that changes arguments where other arguments want a gradient: none flows through what is changed."""
    if candidate is not None and not candidate.kernel.differentiable:
        before = copied(op, call)  # for backward; the caller's tensor goes on changing
        return attach(op, candidate, before, *_run_for_backward(op, candidate, call))
    copy = copied(op, call)  # which the graph holds
    results = op.run_reference(copy) if candidate is None else candidate.forward(copy)
    with torch.no_grad():
        for name in op.written:
            if (value := getattr(call, name)) is not None:
                value.copy_(getattr(copy, name))
    return results


def choose_and_run(
    op: Op[..., Any], call: Call, found: Candidates, scope: Scope, how: Run = run, failed: Failed = ()
) -> Any:
    """Run the best candidate for a call.

    Args:
        op: the op.
        call: the call.
        found: the candidates for its device and dtype.
        scope: settings in force.
        how: runs a candidate, or the reference for None.
        failed: kernels that raised before, in this call.
    """
    candidate, tuned, refusals = choose(op, call, found)
    if tuned is None and (candidate is None or candidate.backend == TORCH):
        fall_back(op, found, candidate, refusals)
    if tuned is not None and tuned.config is not None:
        call = call._replace(config=tuned.config)
    selection = None
    try:
        if scope.log is None and not OBSERVERS:
            result = how(op, candidate, call)
        else:
            children: list[Selection] = []
            with scoped(replace(scope, log=children)):
                result = how(op, candidate, call)
            selection = selection_of(op, call, candidate, tuned, refusals, children)
            if scope.log is not None:
                scope.log.append(selection)
    except Exception as error:
        if candidate is not None:
            return after_failure(op, call, found, scope, how, (*failed, (candidate, error)))
        raise_of_call(error, failed)
    (op.counts[REFERENCE] if candidate is None else candidate.count).calls += 1
    if failed:
        warn_of_failures(op.name, failed, candidate)
    if selection is not None:
        tell_observers(selection)
    return result


def after_failure(op: Op[..., Any], call: Call, found: Candidates, scope: Scope, how: Run, failed: Failed) -> Any:
    """Contain the last failure and run the next kernel, or raise it.

    The candidates are those that the call began with: a backend may have been removed meanwhile.
    """
    candidate, error = failed[-1]
    try:
        contained = is_contained(error) and not scope.strict and not found.explicit
        if contained:
            candidate.note(error)
            found = found.without(candidate, error)
        if op.mutates or not contained:  # what was half written must not be written again
            error.add_note(f"raised by kernel {candidate.identity}")
            raise error
        return choose_and_run(op, call, found, scope, how, failed)
    finally:
        # Its traceback holds this frame: both would keep the call's tensors until Python looks for such rings.
        del error, failed
