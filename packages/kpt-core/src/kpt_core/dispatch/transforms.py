"""Who serves under torch.func and for second derivatives: plain PyTorch, but for a gradient alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._C._functorch import CVmapInterpreterPtr, TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from kpt_core.contract import TORCH, Call, Op
from kpt_core.errors import KptWarning, warn_caller
from kpt_core.selection import Refused

from .candidates import Candidate, Candidates, candidates_of, first_of

_NOT_PLAIN = "a transform of torch.func is at work, and no kernel is known to be transparent to it"
#: Bytes from which plain PyTorch says, once for each op, what it takes.
_LARGE = 2**28


def under_transform() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# Dynamo calls it instead of tracing it: a graph would hold the question otherwise. By an attribute, because importing
# `torch.compiler.assume_constant_result`, which sets it, imports Dynamo.
under_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_lone_gradient() -> bool:
    """Return whether `torch.func.grad` or `vjp` is at work, once, and nothing else is: kernels can serve there."""
    levels = get_interpreter_stack() or ()
    return [level.key() for level in levels] == [TransformType.Grad] and forward_ad._current_level < 0


def _is_mapped() -> bool:
    return any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())


def warn_of_memory(op: Op[..., Any], call: Call, *, derivatives: int = 0) -> None:
    """Say, once for each op, that plain PyTorch takes much memory for a call.

    Args:
        op: the op, which tells the bytes.
        call: the call.
        derivatives: how many derivatives are taken, beside those of transforms.
    """
    if op.plain_bytes is None or "memory" in op.told_of:
        return
    levels = get_interpreter_stack() or ()
    kinds = [level.key() for level in levels]
    names = {TransformType.Vmap: "vmap", TransformType.Jvp: "jvp", TransformType.Grad: "grad"}
    by = "" if derivatives > 1 else " of ".join(f"torch.func.{names[kind]}" for kind in kinds if kind in names)
    by = by or ("forward-mode differentiation" if forward_ad._current_level >= 0 else "a second derivative")
    derivatives = max(derivatives, len(levels) - kinds.count(TransformType.Vmap), forward_ad._current_level + 1)
    size: Any = op.plain_bytes(call)
    for level in levels:
        if level.key() == TransformType.Vmap:
            size *= CVmapInterpreterPtr(level).batchSize()
    # Counted for attention: a derivative keeps about one and a half times what the results alone take.
    size += size * 3 * derivatives // 2
    if not isinstance(size, int) or size < _LARGE:  # a tracer's sizes are no numbers yet
        return
    op.told_of.add("memory")
    sizes = ", ".join(f"{name} {list(each.shape)}" for name in op.kinds if (each := getattr(call, name)) is not None)
    told = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
    warn_caller(
        f"{by} of {op.name} computes in plain PyTorch and takes about {told} for {sizes}; use smaller parts, or "
        "first derivatives by backward(), torch.func.grad or vjp with no other transform, which kernels serve",
        KptWarning,
    )


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
    best = next((each.forward for each in plain if each.refusal(call) is None), None)
    if best is None:
        warn_of_memory(op, call, derivatives=2)
    return best or op.run_reference
