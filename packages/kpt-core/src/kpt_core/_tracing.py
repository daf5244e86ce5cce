"""Dispatch inside torch.compile: the choice is made while Dynamo traces, and nothing of it stays in the graph."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from . import _registry
from ._candidates import Candidates, needs_gradient
from ._errors import NoKernelError
from ._fallback import refusal_of_reference, warn_of_fallback
from ._selection import REFERENCE, Refusal
from ._settings import current

if TYPE_CHECKING:
    from ._op import Op

P = ParamSpec("P")
R = TypeVar("R")


def dispatch_traced(op: "Op[..., Any]", first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve a call while Dynamo traces it."""
    found = traced_candidates(op, first)
    if found.tuned is not None:
        entry = found.tuned.common.get(needs_gradient(args, kwargs))
        if entry is not None:
            if entry.kernel == REFERENCE and found.explicit is None:
                return op.reference(*args, **kwargs)
            for candidate in found.accepted:
                if candidate.kernel.target == entry.kernel and candidate.refusal(args, kwargs) is None:
                    return candidate.call(*args, **kwargs)
    for candidate in found.accepted:
        if candidate.refusal(args, kwargs) is None:
            return candidate.call(*args, **kwargs)
    refusal = _fall_back(op.name, str(first.device), first.dtype)
    if refusal is not None:
        raise NoKernelError(refusal)
    return op.reference(*args, **kwargs)


def traced_candidates(op: "Op[..., Any]", x: torch.Tensor) -> Candidates:
    """The candidates for `x`'s device and dtype, read from a dictionary on whose content Dynamo guards."""
    scope = current.scope
    scope_key = "" if scope is None else scope.key
    _find(op.name, str(x.device), x.dtype, scope_key)
    return op.traced[x.device, x.dtype, scope_key]


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo call a function instead of tracing it, as `torch.compiler.assume_constant_result` does.

    That one imports Dynamo, which takes longer than everything else here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _find(name: str, device: str, dtype: torch.dtype, scope_key: str) -> bool:
    """Fill the dictionary."""
    op = _registry.get_op(name)
    op.traced[torch.device(device), dtype, scope_key] = op.candidates(torch.device(device), dtype)
    return True


@_constant
def _fall_back(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why the reference may not serve a traced call; if it may and is slow, that is said."""
    op, where = _registry.get_op(name), torch.device(device)
    found = op.candidates(where, dtype)
    refused = [
        Refusal(candidate.backend, candidate.kernel.target, "refuses these arguments (`explain` says why)")
        for candidate in found.accepted
    ]
    refusals = [*found.refusals, *refused]
    refusal = refusal_of_reference(op, found, refusals, where, dtype)
    if refusal is None:
        warn_of_fallback(op, found, refusals, where, dtype)
    return refusal
