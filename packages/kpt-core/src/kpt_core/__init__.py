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
    TuningWarning,
    UnknownNameError,
)
from ._files import write_whole
from ._kernel import Backend, Capability, Kernel
from ._lock import Lock, LockEntry, read_lock, write_lock
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
from ._tuning import device_name, next_power_of_two, tuned_config
from ._tuning_files import TuningEntry
from ._tuning_run import Tuning, model_cases, tune
from ._tuning_trials import TuningResult
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
    "Lock",
    "LockEntry",
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
    "Tuning",
    "TuningEntry",
    "TuningResult",
    "TuningWarning",
    "UnknownNameError",
    "WrongInput",
    "add_backend",
    "apply_plan",
    "backends",
    "case_tables",
    "device_name",
    "explain",
    "gain_of",
    "get_op",
    "interleaved_times",
    "layer_cases",
    "model_cases",
    "next_power_of_two",
    "op",
    "ops",
    "optimize",
    "problems",
    "read_lock",
    "record",
    "refresh",
    "remove_backend",
    "rewrites",
    "tune",
    "tuned_config",
    "use",
    "without_autocast",
    "write_lock",
    "write_whole",
]
