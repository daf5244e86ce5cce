"""KPT's core: ops, kernels, backends, and what introduces one to the other."""

from importlib import import_module
from typing import Any

from .contract import Backend, Call, Capability, Kernel, Op
from .dispatch.settings import record, use
from .errors import (
    FallbackWarning,
    InputError,
    KernelFailedWarning,
    KptError,
    KptWarning,
    NoKernelError,
    PluginWarning,
    RegistrationError,
    UnknownNameError,
)
from .operation import explain, op
from .registry import backends, get_op, ops, refresh
from .selection import Refusal, Selection

_OF_OPTIMIZE = {"Plan": "plan", "apply_plan": "optimize", "optimize": "optimize", "tune": "tuning.run"}


def __getattr__(name: str) -> Any:
    # Of another package, for who looks for them here.
    if name not in _OF_OPTIMIZE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"kpt_optimize.{_OF_OPTIMIZE[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kpt_optimize":
            raise
        raise ImportError(f"kpt_core.{name} is in kpt-optimize: pip install ./packages/kpt-optimize") from None
    globals()[name] = found = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Call",
    "Capability",
    "FallbackWarning",
    "InputError",
    "Kernel",
    "KernelFailedWarning",
    "KptError",
    "KptWarning",
    "NoKernelError",
    "Op",
    "Plan",
    "PluginWarning",
    "Refusal",
    "RegistrationError",
    "Selection",
    "UnknownNameError",
    "apply_plan",
    "backends",
    "explain",
    "get_op",
    "op",
    "ops",
    "optimize",
    "record",
    "refresh",
    "tune",
    "use",
]
