"""Running what was chosen; a kernel that raises gives way to the next one."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kpt_core.contract import TORCH, Call
from kpt_core.selection import Selection

from .autograd import attach
from .candidates import Candidate, Candidates
from .choice import choose, selection_of
from .containment import is_contained, raise_of_call, warn_of_failures
from .fallback import fall_back
from .settings import Scope, scoped

if TYPE_CHECKING:
    from kpt_core.operation import Op

Run = Callable[["Op[..., Any]", Candidate | None, Call], Any]
Failed = tuple[tuple[Candidate, Exception], ...]


def run(op: "Op[..., Any]", candidate: Candidate | None, call: Call) -> Any:
    """The results of a kernel, or of the reference, tied to autograd where a gradient is needed."""
    if op.mutates:
        # What a kernel writes past torch must not go unseen by autograd.
        torch.autograd.graph.increment_version([getattr(call, name) for name in op.mutates])
    if candidate is None:
        return op.run_reference(call)
    if not call.needs:
        result = candidate.forward(call)
        return result[0] if candidate.saves else result
    if candidate.kernel.differentiable:
        return candidate.forward(call)
    with torch.no_grad():
        result = candidate.forward(call)
    return attach(op, candidate, call, *(result if candidate.saves else (result, ())))


def choose_and_run(
    op: "Op[..., Any]", call: Call, found: Candidates, scope: Scope, how: Run = run, failed: Failed = ()
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
    try:
        if scope.log is None:
            result = how(op, candidate, call)
        else:
            children: list[Selection] = []
            with scoped(replace(scope, log=children)):
                result = how(op, candidate, call)
            scope.log.append(selection_of(op, call, candidate, tuned, refusals, children))
    except Exception as error:
        if candidate is not None:
            return after_failure(op, call, found, scope, how, (*failed, (candidate, error)))
        raise_of_call(error, call, failed)
    if failed:
        warn_of_failures(op.name, failed, candidate)
    return result


def after_failure(op: "Op[..., Any]", call: Call, found: Candidates, scope: Scope, how: Run, failed: Failed) -> Any:
    """Contain the last failure and run the next kernel, or raise it.

    The candidates are those that the call began with: a backend may have been removed meanwhile.
    """
    candidate, error = failed[-1]
    if scope.strict or found.explicit or op.mutates or not is_contained(error):
        error.add_note(f"raised by kernel {candidate.identity}")
        raise error
    candidate.keep_from(call, error)
    return choose_and_run(op, call, found, scope, how, failed)
