"""What is said where no vendor's kernel serves a call."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from kpt_core import registry
from kpt_core.contract import TORCH
from kpt_core.errors import FallbackWarning, NoKernelError, warn_caller
from kpt_core.selection import Refused

from .candidates import Candidate, Candidates
from .settings import effective

if TYPE_CHECKING:
    from kpt_core.operation import Op


def fall_back(
    op: "Op[..., Any]",
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
    """Whether plain PyTorch would serve an accelerator without having been asked for.

    A kernel that is composed of ops of which a vendor may serve some does not count: each of those tells for itself.
    """
    if found.explicit or not registry.reference_is_slow(found.device):
        return False
    return candidate is None or not _parts_may_be_served(candidate, found.device, found.dtype)


def _parts_may_be_served(candidate: Candidate, device: torch.device, dtype: torch.dtype) -> bool:
    known = registry.ops()
    parts = [known[name] for name in candidate.kernel.composed_of if name in known]
    accepted = [each for part in parts for each in part.candidates(device, dtype).accepted]
    return any(each.backend != TORCH or _parts_may_be_served(each, device, dtype) for each in accepted)


def _advice(device: torch.device) -> str:
    missing = "" if registry.serves(device.type) else f"no backend for {device.type} is installed; "
    return f"{missing}see `kpt doctor`"
