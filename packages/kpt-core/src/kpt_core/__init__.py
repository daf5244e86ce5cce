"""KPT's core: ops, kernels, backends, and what introduces one to the other."""

from typing import TYPE_CHECKING

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
from ._op import Op, op
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
from ._rewrite import LEVELS, Rewrite, Site, check_level, check_objective
from ._selection import Refusal, Selection
from ._settings import record
from ._tuning import device_name, next_power_of_two, tuned_config
from ._tuning_files import TuningEntry
from ._use import explain, use

if TYPE_CHECKING:
    from ._attempt import DEFAULT_MAX_ERROR
    from ._lock import Lock, LockEntry, read_lock, write_lock
    from ._measure import gain_of, interleaved_times, parameter_bytes, relative_error, rounding
    from ._optimize import Optimized, apply_plan, optimize
    from ._plan import Plan, PlanEntry
    from ._tuning_run import Tuning, model_cases, tune
    from ._tuning_trials import TuningResult
else:  # only what a call of an op needs is imported with the package

    def __getattr__(name: str) -> object:
        from importlib import import_module

        modules = {
            "_attempt": ("DEFAULT_MAX_ERROR",),
            "_lock": ("Lock", "LockEntry", "read_lock", "write_lock"),
            "_measure": ("gain_of", "interleaved_times", "parameter_bytes", "relative_error", "rounding"),
            "_optimize": ("Optimized", "apply_plan", "optimize"),
            "_plan": ("Plan", "PlanEntry"),
            "_tuning_run": ("Tuning", "model_cases", "tune"),
            "_tuning_trials": ("TuningResult",),
        }
        module = next((module for module, names in modules.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f".{module}", __name__), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "DEFAULT_MAX_ERROR",
    "LEVELS",
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
    "check_level",
    "check_objective",
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
    "parameter_bytes",
    "problems",
    "read_lock",
    "record",
    "refresh",
    "relative_error",
    "remove_backend",
    "rewrites",
    "rounding",
    "tune",
    "tuned_config",
    "use",
    "without_autocast",
    "write_lock",
    "write_whole",
]
