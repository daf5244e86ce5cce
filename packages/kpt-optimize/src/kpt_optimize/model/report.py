"""The report of an optimisation: what was kept, rolled back or not tried, and why."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kpt_core.errors import KptWarning
from kpt_optimize.plan import Plan, table

KEPT, ROLLED_BACK, NOT_TRIED = "kept", "rolled back", "not tried"


class OptimizationWarning(KptWarning):
    """A step of an optimisation failed and was rolled back, or nothing could be measured."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One thing that the model's owner may do: `why` has the figure that led to it, `effect` what to expect."""

    what: str
    why: str
    effect: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.effect}. {self.how}"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step of an optimisation.

    Attributes:
        step: its name.
        setting: what was set, such as the mode of `torch.compile`.
        status: `kept`, `rolled back` or `not tried`.
        reason: why, as a sentence with the figures that decided.
        gain: seconds (or bytes, for memory) without it / with it; None if it was not measured.
        error: of the model with it and the steps kept before, against the original; None if it was not compared.
        preparation_seconds: of making it and its first run, compilation included; None if it was not tried.
    """

    step: str
    setting: str
    status: str
    reason: str
    gain: float | None = None
    error: float | None = None
    preparation_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OptimizationReport:
    """Every step in the order of trial, and the effect of the kept ones together.

    `seconds_*` are medians of a forward or a training step on the sample, `bytes_*` are parameters and buffers, `plan`
    is of the module rewrites, if any applied. Without sample inputs seconds and error are None. `note` tells of a busy
    machine, and is empty on a quiet one.
    """

    model: str
    purpose: str
    level: str
    objective: str
    device: str
    outcomes: tuple[StepOutcome, ...]
    plan: Plan | None
    recommendations: tuple[Recommendation, ...]
    seconds_before: float | None
    seconds_after: float | None
    bytes_before: int
    bytes_after: int
    error: float | None
    note: str = ""

    @property
    def kept(self) -> tuple[StepOutcome, ...]:
        """Return the steps in force."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == KEPT)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, which knows no infinity: an infinite error is None."""
        data = asdict(self)
        for part in (data, *data["outcomes"]):
            part["error"] = None if part["error"] is None or math.isinf(part["error"]) else part["error"]
        data["plan"] = None if self.plan is None else self.plan.as_dict()
        return data

    def __str__(self) -> str:
        rows = [
            (o.step, o.setting, o.status, _shown(o.gain, ".2f", "x"), _shown(o.error, ".1e"), o.reason)
            for o in self.outcomes
        ]
        lines = [self.note] if self.note else []
        lines += table(("step", "setting", "", "gain", "error", "reason"), *rows)
        effect = f"{self.bytes_before / 2**20:.1f} MiB before, {self.bytes_after / 2**20:.1f} MiB after"
        if self.seconds_before is None or self.seconds_after is None:
            effect = f"nothing was measured: pass sample inputs; {effect}"
        else:
            times = f"{self.seconds_before * 1e3:.2f} ms before, {self.seconds_after * 1e3:.2f} ms after"
            effect = f"{times}; {effect}; error {_shown(self.error, '.1e')}"
        lines.append(f"{self.model} for {self.purpose} on {self.device}, level {self.level}: {effect}")
        return "\n".join([*lines, *(f"- {recommendation}" for recommendation in self.recommendations)])


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
