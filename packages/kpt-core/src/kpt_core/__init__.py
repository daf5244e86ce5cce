"""KPT's core: ops, kernels, backends, and what introduces one to the other."""

from typing import TYPE_CHECKING

from .contract import Backend, Call, Capability, Kernel, Refusal
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
from .operation import Op, explain, op
from .registry import backends, get_op, ops, refresh
from .selection import Selection

if TYPE_CHECKING:
    from .optimization.optimize import apply_plan, optimize
    from .optimization.plan import Plan
    from .tuning.run import tune
else:

    def __getattr__(name: str) -> object:
        # Most processes never optimise or tune.
        from importlib import import_module

        module = {"Plan": "plan", "apply_plan": "optimize", "optimize": "optimize"}.get(name)
        place = f".optimization.{module}" if module else ".tuning.run" if name == "tune" else None
        if place is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(place, __name__), name)
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
