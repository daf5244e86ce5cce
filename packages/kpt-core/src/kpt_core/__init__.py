"""KPT's core: ops, kernels, backends, and what introduces one to the other."""

from .contract import Backend, Call, Capability, Kernel, Op
from .dispatch.settings import observe, record, use
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
from .operation import counts, explain, op
from .registry import backends, get_op, ops, refresh
from .selection import KernelCount, Refusal, Selection

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Call",
    "Capability",
    "FallbackWarning",
    "InputError",
    "Kernel",
    "KernelCount",
    "KernelFailedWarning",
    "KptError",
    "KptWarning",
    "NoKernelError",
    "Op",
    "PluginWarning",
    "Refusal",
    "RegistrationError",
    "Selection",
    "UnknownNameError",
    "backends",
    "counts",
    "explain",
    "get_op",
    "observe",
    "op",
    "ops",
    "record",
    "refresh",
    "use",
]
