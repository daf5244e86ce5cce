"""What a user may set for `ModelOptimizer`, and its warning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kpt_core.errors import InputError, KptWarning
from kpt_optimize.rewrite import check_max_error, check_objective

#: The dtypes that tensor cores multiply and that `mixed_precision` may use.
HALVES = (torch.bfloat16, torch.float16)


class OptimizationWarning(KptWarning):
    """A step of an optimisation failed and was rolled back, or nothing could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What `ModelOptimizer` may do beyond its level.

    Attributes:
        objective: `latency` (seconds of the sample) or `memory` (bytes of parameters and buffers; inference only).
        max_error: error budget, as `max |after - before| / max |before|`. None gives that of the level, as
            `kpt_core.optimize` does.
        dtype: what `mixed_precision` computes in, `torch.bfloat16` or `torch.float16`. Training in float16 scales the
            loss.
        compile_backend: handed to `torch.compile`. Modes are for `inductor`; another backend is called without one.
        seconds: about how long to time each step.
        skip: names of steps that must not be tried.

    Raises:
        InputError: a dtype that tensor cores don't have, a negative budget, or no time to measure.
        UnknownNameError: no such objective.
    """

    objective: str = "latency"
    max_error: float | None = None
    dtype: torch.dtype = torch.bfloat16
    compile_backend: str | Callable[..., Any] = "inductor"
    seconds: float = 0.6
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_objective(self.objective)
        check_max_error(self.max_error)
        if self.dtype not in HALVES:
            raise InputError(f"dtype must be torch.bfloat16 or torch.float16; got {self.dtype!r}")
        if not self.seconds > 0:
            raise InputError(f"seconds must be above 0, or nothing is measured; got {self.seconds!r}")
