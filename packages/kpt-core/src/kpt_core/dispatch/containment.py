"""Contain the failure of a kernel, and tell of it; tell, too, where no vendor's kernel serves a call."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from kpt_core import registry
from kpt_core.contract import GPU, TORCH, Call, Op
from kpt_core.errors import FallbackWarning, KernelFailedWarning, KptError, NoKernelError, warn_caller
from kpt_core.selection import Refused

from .candidates import MOST_FAILURES, Candidate, Candidates, candidates_of
from .settings import effective

Failed = Sequence[tuple[Candidate, Exception]]


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of an op, of which there may be none, one or several."""
    return results if isinstance(results, tuple) else () if results is None else (results,)


def checked(op: Op[..., Any], candidate: Candidate, call: Call, output: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Take apart what a kernel's forward gave: results, and what is saved for backward.

    Raises:
        TypeError: it is not what the op's contract says: others would read other numbers than were written.
    """
    results, saved = output, ()
    if candidate.saves:
        if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], tuple | list)):
            raise TypeError(f"it gave {_told(output)}; expected (results, saved), since {op.name} says what is saved")
        results, saved = output[0], tuple(output[1])
        if call.needs and len(saved) != op.saved_count:
            raise TypeError(f"it saved {len(saved)} tensors; {op.name} says {op.saved_count}")
    given = as_tuple(results)
    if len(given) != op.result_count:
        raise TypeError(f"it gave {_told(results)}; {op.name} gives {op.result_count} results")
    expected = given if op.fake is None else as_tuple(op.fake(call))
    for place, (told, each) in enumerate(zip(expected, given, strict=True)):
        if place in op.optional_results and not getattr(call, op.optional_results[place]):
            if each is not None:
                raise TypeError(f"result {place} is {_told(each)}; nobody asked for it: expected None")
        elif not isinstance(each, Tensor):
            raise TypeError(f"result {place} is {_told(each)}; expected a tensor")
        elif (told.dtype, told.shape) != (each.dtype, each.shape):
            raise TypeError(f"result {place} is {_told(each)}; the contract of {op.name} says {_told(told)}")
    return results, saved


def agrees(op: Op[..., Any], call: Call, given: tuple[Any, ...]) -> bool:
    """Return whether results are what the contract says."""
    expected = given if op.fake is None else as_tuple(op.fake(call))
    return len(given) == op.result_count == len(expected) and all(
        told is each or (isinstance(each, Tensor) and told is not None and told.dtype is each.dtype
                         and told.shape == each.shape)
        for told, each in zip(expected, given, strict=True)
    )  # fmt: skip


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"({', '.join(map(_told, value))})" if isinstance(value, tuple) else repr(value)[:60]


def is_contained(error: Exception) -> bool:
    """Return whether a failure is the kernel's own: running out of memory and refusals of KPT are not."""
    return not (isinstance(error, KptError | torch.OutOfMemoryError | MemoryError) or _ends_recomputation(error))


def _ends_recomputation(error: Exception) -> bool:
    """Return whether activation checkpointing stops a recomputation: it raises where a kernel saves its last tensor."""
    # By name: who has not imported the module can't have raised its error.
    stop = getattr(sys.modules.get("torch.utils.checkpoint"), "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)


def raise_of_call(error: Exception, failed: Failed) -> NoReturn:
    """Raise what plain PyTorch raised after kernels did: the call is wrong, not they."""
    for candidate, raised in failed:
        candidate.take_back(raised)
    try:
        raise error from (failed[0][1] if failed else error.__cause__)
    finally:
        del error, failed  # see `after_failure`


def warn_of_failures(op: str, failed: Failed, ran: Candidate | None, *, backward: bool = False) -> None:
    """Say which kernels raised and what ran in their place."""
    instead = "the reference" if ran is None else ran.kernel.forward
    for candidate, error in failed:
        warn_caller(
            f"{'the backward of ' * backward}kernel {candidate.kernel.forward} raised {type(error).__name__}: {error}; "
            f"{instead} ran {op} in its place; after {MOST_FAILURES} failures it is off (KPT_STRICT=1 raises instead)",
            KernelFailedWarning,
        )


def fall_back(
    op: Op[..., Any],
    found: Candidates,
    candidate: Candidate | None,
    refusals: Iterable[Refused],
    *,
    tell: bool = True,
) -> None:
    """Raise unless plain PyTorch may serve a call; on an accelerator say, once for its type, that it does.

    Args:
        op: the op.
        found: the candidates for the call.
        candidate: a kernel in plain PyTorch; None for the reference.
        refusals: of the others.
        tell: whether to say it.

    Raises:
        NoKernelError: something else was asked for, or strict mode forbids it.
    """
    device = found.device
    if candidate is None and not found.reference:
        raise NoKernelError(f"no kernel for {op.name} on {device}: {found.explicit} was asked for{_listed(refusals)}")
    if not _is_slow(found, candidate):
        return
    if effective().strict:
        raise NoKernelError(f"no kernel for {op.name} on {device} (strict); {_advice(device)}{_listed(refusals)}")
    if tell and device.type not in op.told_of:
        op.told_of.add(device.type)
        reasons = f"{_advice(device)}{_listed(refusals)}"
        warn_caller(f"{op.name} runs in plain PyTorch on {device}, which is slow; {reasons}", FallbackWarning)


def _listed(refusals: Iterable[Refused]) -> str:
    return "".join(f"\n  {refusal}" for refusal in refusals)


def _is_slow(found: Candidates, candidate: Candidate | None) -> bool:
    """Return whether plain PyTorch would serve an accelerator without having been asked for.

    A kernel for GPUs does not count, nor one that is composed of ops of which a vendor may serve some: each of those
    tells for itself.
    """
    if found.explicit or not registry.reference_is_slow(found.device):
        return False
    if candidate is not None and GPU in candidate.kernel.requires:
        return False
    return candidate is None or not _parts_may_be_served(candidate, found.device, found.dtype)


def _parts_may_be_served(candidate: Candidate, device: torch.device, dtype: torch.dtype) -> bool:
    known = registry.ops()
    parts = [known[name] for name in candidate.kernel.composed_of if name in known]
    accepted = [each for part in parts for each in candidates_of(part, device, dtype).accepted]
    return any(each.backend != TORCH or _parts_may_be_served(each, device, dtype) for each in accepted)


def _advice(device: torch.device) -> str:
    missing = "" if registry.serves(device.type) else f"no backend for {device.type} is installed; "
    return f"{missing}see `kpt doctor`"
