"""KPT's core: ops, kernels, backends, and what introduces one to the other."""

from ._autocast import without_autocast
from ._cases import Arguments, Case, CaseTable, LayerCase, WrongInput
from ._config import Config
from ._errors import (
    FallbackWarning,
    InputError,
    KernelFailedWarning,
    KptError,
    KptWarning,
    NoKernelError,
    PluginWarning,
    RegistrationError,
    SignatureError,
    UnknownNameError,
)
from ._files import write_whole
from ._kernel import Backend, Capability, Kernel
from ._measure import gain_of, interleaved_times
from ._op import Op, op
from ._optimize import Optimized, apply_plan, optimize
from ._plan import Plan, PlanEntry
from ._registry import (
    Problem,
    add_backend,
    backends,
    case_tables,
    get_op,
    layer_cases,
    ops,
    problems,
    refresh,
    remove_backend,
    rewrites,
)
from ._rewrite import Rewrite, Site
from ._selection import Refusal, Selection
from ._settings import record
from ._use import explain, use

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "Backend",
    "Capability",
    "Case",
    "CaseTable",
    "Config",
    "FallbackWarning",
    "InputError",
    "Kernel",
    "KernelFailedWarning",
    "KptError",
    "KptWarning",
    "LayerCase",
    "NoKernelError",
    "Op",
    "Optimized",
    "Plan",
    "PlanEntry",
    "PluginWarning",
    "Problem",
    "Refusal",
    "RegistrationError",
    "Rewrite",
    "Selection",
    "SignatureError",
    "Site",
    "UnknownNameError",
    "WrongInput",
    "add_backend",
    "apply_plan",
    "backends",
    "case_tables",
    "explain",
    "gain_of",
    "get_op",
    "interleaved_times",
    "layer_cases",
    "op",
    "ops",
    "optimize",
    "problems",
    "record",
    "refresh",
    "remove_backend",
    "rewrites",
    "use",
    "without_autocast",
    "write_whole",
]
