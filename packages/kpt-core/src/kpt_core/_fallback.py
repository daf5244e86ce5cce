"""When the reference serves a call because no kernel does: refusing that, or saying it once."""

from collections.abc import Iterable

import torch

from . import _registry
from ._candidates import Candidates
from ._errors import FallbackWarning, warn_caller
from ._selection import Refusal
from ._settings import effective


def refusal_of_reference(op: str, found: Candidates, refusals: Iterable[Refusal], device: torch.device) -> str | None:
    """Why the reference may not serve a call that no kernel serves, or None."""
    if not found.reference:
        return f"no kernel for {op} on {device}: {found.explicit} was asked for{_listed(refusals)}"
    if _is_slow(found, device) and effective().strict:
        return f"no kernel for {op} on {device} (strict); {_advice(device)}{_listed(refusals)}"
    return None


def warn_of_fallback(
    op: str, said: set[str], found: Candidates, refusals: Iterable[Refusal], device: torch.device
) -> None:
    """Say once for each type of accelerator (noted in `said`) that the reference serves it."""
    if _is_slow(found, device) and device.type not in said:
        said.add(device.type)
        warn_caller(
            f"{op} runs its PyTorch reference on {device}, which is slow; {_advice(device)}{_listed(refusals)}",
            FallbackWarning,
        )


def _listed(refusals: Iterable[Refusal]) -> str:
    return "".join(f"\n  {refusal}" for refusal in refusals)


def _is_slow(found: Candidates, device: torch.device) -> bool:
    """Whether the reference would serve an accelerator without having been asked for."""
    return device.type not in ("cpu", "meta") and not found.explicit


def _advice(device: torch.device) -> str:
    missing = "" if _registry.serves(device.type) else f"no backend for {device.type} is installed; "
    return f"{missing}see `kpt doctor`"
