"""Who serves under torch.func and for second derivatives: plain PyTorch alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from kpt_core.contract import TORCH, Call, Op
from kpt_core.selection import Refused

from .candidates import Candidate, Candidates, candidates_of, first_of

_NOT_PLAIN = "a transform of torch.func is at work, and no kernel is known to be transparent to it"


def under_transform() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# Dynamo calls it instead of tracing it: a graph would hold the question otherwise. By an attribute, because importing
# `torch.compiler.assume_constant_result`, which sets it, imports Dynamo.
under_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_mapped() -> bool:
    return any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())


def _is_plain(candidate: Candidate) -> bool:
    """Return whether it is plain PyTorch all through, which can be differentiated as often as one likes."""
    return candidate.backend == TORCH and candidate.kernel.differentiable


def transformed(found: Candidates) -> Candidates:
    """Return those of the candidates that a transform goes through: under vmap, where no value can be read, none."""
    accepted = () if _is_mapped() else tuple(filter(_is_plain, found.accepted))
    refused = (Refused(e.backend, e.kernel.forward, _NOT_PLAIN) for e in found.accepted if e not in accepted)
    return replace(found, accepted=accepted, refusals=(*found.refusals, *refused), tuned=None)


def plain_function(op: Op[..., Any], call: Call) -> Callable[[Call], Any]:
    """Return what gradients that are differentiated themselves go through: a torch kernel, or the reference."""
    first = first_of(op, call)
    plain = filter(_is_plain, candidates_of(op, first.device, first.dtype).accepted)
    return next((each.forward for each in plain if each.refusal(call) is None), op.run_reference)
