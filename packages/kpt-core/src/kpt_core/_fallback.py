"""When the reference serves a call because no kernel does: refusing that, or saying it once."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import _registry
from ._candidates import Candidates
from ._errors import FallbackWarning, warn_caller
from ._selection import Refusal
from ._settings import effective

if TYPE_CHECKING:
    from ._op import Op


def refusal_of_reference(
    op: "Op[..., Any]", found: Candidates, refusals: Iterable[Refusal], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the reference may not serve a call that no kernel serves, or None."""
    if not found.reference:
        return f"no kernel for {op.name} on {device}: {found.explicit} was asked for{_listed(refusals)}"
    if effective().strict and _is_slow(op, found, device, dtype):
        return f"no kernel for {op.name} on {device} (strict); {_advice(device)}{_listed(refusals)}"
    return None


def warn_of_fallback(
    op: "Op[..., Any]", found: Candidates, refusals: Iterable[Refusal], device: torch.device, dtype: torch.dtype
) -> None:
    """Say once for each type of accelerator (noted in the op's `said`) that the reference serves it."""
    if device.type not in op.said and _is_slow(op, found, device, dtype):
        op.said.add(device.type)
        warn_caller(
            f"{op.name} runs its PyTorch reference on {device}, which is slow; {_advice(device)}{_listed(refusals)}",
            FallbackWarning,
        )


def _listed(refusals: Iterable[Refusal]) -> str:
    return "".join(f"\n  {refusal}" for refusal in refusals)


def _is_slow(op: "Op[..., Any]", found: Candidates, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the reference would serve an accelerator without having been asked for.

    That of a composite op does not count if a kernel may serve some op that it calls: each of those tells for itself.
    """
    if device.type in ("cpu", "meta") or found.explicit:
        return False
    return not _parts_may_be_served(op, device, dtype)


def _parts_may_be_served(op: "Op[..., Any]", device: torch.device, dtype: torch.dtype) -> bool:
    if not op.composed_of:
        return False
    known = _registry.ops()
    parts = [known[name] for name in op.composed_of if name in known]
    return any(part.candidates(device, dtype).accepted or _parts_may_be_served(part, device, dtype) for part in parts)


def _advice(device: torch.device) -> str:
    missing = "" if _registry.serves(device.type) else f"no backend for {device.type} is installed; "
    return f"{missing}see `kpt doctor`"
