"""What went wrong in a call, and whose fault it is: the kernel's, the arguments' or nobody's."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._candidates import Candidate
from ._errors import KernelFailedWarning, KptError, SignatureError, warn_caller


def is_contained(error: Exception) -> bool:
    """Whether a failure is the kernel's own: running out of memory and refusals of KPT are not."""
    return not (isinstance(error, KptError | torch.OutOfMemoryError | MemoryError) or _ends_recomputation(error))


def _ends_recomputation(error: Exception) -> bool:
    """Whether activation checkpointing stops a recomputation: it raises where the kernel saves its last tensor."""
    # By name: who has not imported the module can't have raised its error.
    stop = getattr(sys.modules.get("torch.utils.checkpoint"), "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)


def warn_of_failure(op: str, failed: Candidate, error: Exception, ran: Candidate | None) -> None:
    """Say that a kernel raised and what ran in its place, the reference if `ran` is None."""
    warn_caller(
        f"kernel {failed.kernel.target} raised {type(error).__name__}: {error}; it is quarantined for this "
        f"signature of {op} and {ran.kernel.target if ran else 'the reference'} ran "
        "(KPT_STRICT=1 raises instead)",
        KernelFailedWarning,
    )


def require_binding(op: str, reference: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `SignatureError` naming the op unless its reference could be called with these arguments."""
    signature = inspect.signature(reference)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        taken = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise SignatureError(f"{op}: {error}; it takes {taken}") from None
