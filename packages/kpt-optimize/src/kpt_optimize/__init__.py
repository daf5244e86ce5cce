"""`optimize`: rewrites of a model that are tried, compared, measured, and kept only if they pay; tuning and lock files.

A vendor's own optimiser uses the same trial loop: `attempt`, with a `Trial` that says what its candidates are.
"""

from .attempt import ModuleTrial, Task
from .changes import Changes
from .measure import Load, device_of, gain_of, interleaved_times, parameter_bytes, relative_error, rounding
from .optimize import Optimized, apply_plan, conclude, optimize
from .plan import Budget, Plan, PlanEntry, table
from .rewrite import LEVELS, Rewrite, Site, check_level, check_max_error, check_model, check_objective, rewrites
from .trial import (
    DEFAULT_MAX_ERROR,
    Example,
    RejectedError,
    Trial,
    UnsteadyError,
    Verdict,
    attempt,
    budget_of,
    failed,
    first_run,
    repeatable,
    setback,
)
from .tuning.run import tune

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_MAX_ERROR",
    "LEVELS",
    "Budget",
    "Changes",
    "Example",
    "Load",
    "ModuleTrial",
    "Optimized",
    "Plan",
    "PlanEntry",
    "RejectedError",
    "Rewrite",
    "Site",
    "Task",
    "Trial",
    "UnsteadyError",
    "Verdict",
    "apply_plan",
    "attempt",
    "budget_of",
    "check_level",
    "check_max_error",
    "check_model",
    "check_objective",
    "conclude",
    "device_of",
    "failed",
    "first_run",
    "gain_of",
    "interleaved_times",
    "optimize",
    "parameter_bytes",
    "relative_error",
    "repeatable",
    "rewrites",
    "rounding",
    "setback",
    "table",
    "tune",
]
