"""The plan of an optimisation: a file that says which module was changed how, and what it gained and cost."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kpt_core.errors import InputError
from kpt_core.files import write_whole

from .measure import UNSTEADY, describe_gain, noise_share

FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One rewrite at one module.

    Attributes:
        module: dotted path in the model; a module that the model uses at several paths is changed at all of them.
        rewrite: name of the rewrite.
        op: the op that serves the module after it.
        kernel: the kernel that ran on the example inputs, or `reference`.
        gain: seconds before / seconds after, of this module alone on its inputs; bytes of parameters before / after
            where the objective is memory. Above 1 is better.
        error: `max |after - before| / max |before|` of the module's output.
        kept: whether the rewrite was kept.
        reason: why it was kept or rolled back, as a sentence.
        noise: standard error of `gain`.
    """

    module: str
    rewrite: str
    op: str
    kernel: str
    gain: float
    error: float
    kept: bool
    reason: str
    noise: float = 0.0

    @property
    def measured(self) -> bool:
        """Tell whether `gain` was measured; it is 1 where a refusal or the error came first."""
        return self.gain != 1 or self.noise > 0

    @property
    def noisy(self) -> bool:
        """Tell whether `gain` is too noisy for a figure."""
        return noise_share(self.gain, self.noise) > UNSTEADY


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a larger error budget reaches, measured.

    Attributes:
        max_error: the budget: the greatest error of these modules' outputs and of the model's with all of them.
        modules: so many, or more, have a lossy rewrite within it.
        total: that have one which was kept, or rolled back for its error.
    """

    max_error: float
    modules: int
    total: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every rewrite that `optimize` tried, and the effect of the kept ones on the whole model.

    Attributes:
        model: class name of the model.
        level: `conservative`, `balanced` or `aggressive`.
        objective: `latency` or `memory`.
        device: where it was measured.
        max_error: the error budget of the model's output.
        versions: of Python, torch and KPT's packages.
        entries: what was tried.
        seconds_before: median time of a forward of the example inputs, original model.
        seconds_after: that of the kept rewrites, `seconds_before / gain`; runs of the two were interleaved.
        bytes_before: parameters and buffers of the original model.
        bytes_after: the same with the kept rewrites.
        error: `max |after - before| / max |before|` of the model's first output.
        gain: the median over rounds of seconds before / seconds after.
        noise: standard error of `gain`.
        budgets: what larger ones would allow, by rising error; they say nothing of speed.
        note: says that the machine was busy while it was measured, and what to do; empty where it was not.
    """

    model: str
    level: str
    objective: str
    device: str
    max_error: float
    versions: dict[str, str]
    entries: tuple[PlanEntry, ...]
    seconds_before: float
    seconds_after: float
    bytes_before: int
    bytes_after: int
    error: float
    gain: float = 1.0
    noise: float = 0.0
    budgets: tuple[Budget, ...] = ()
    note: str = ""
    format: int = field(default=FORMAT)

    @property
    def kept(self) -> tuple[PlanEntry, ...]:
        """The entries that were kept."""
        return tuple(entry for entry in self.entries if entry.kept)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: an infinite error is None."""
        plan = asdict(self)
        for part in (plan, *plan["entries"]):
            part["error"] = None if math.isinf(part["error"]) else part["error"]
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_whole(path, json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan.

        Raises:
            InputError: the file is missing, or no plan of a format that this version reads.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"no plan at {path}: `kpt optimize MODEL_DIR -o FILE` writes one") from error
        except (ValueError, OSError) as error:
            raise InputError(f"{path} is not a plan: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{path} is not a plan of format {FORMAT} (found {found!r}): make it again")
        try:
            for part in (data, *data["entries"]):
                part["error"] = math.inf if part["error"] is None else part["error"]
            entries = tuple(PlanEntry(**entry) for entry in data.pop("entries"))
            budgets = tuple(Budget(**each) for each in data.pop("budgets", ()))
            plan = cls(entries=entries, budgets=budgets, **data)
            for made in (plan, *entries, *budgets):
                _check_types(made)
            return plan
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} is not a complete plan: {error}") from error

    def outlook(self, option: str = "max_error=") -> str:
        """Say which larger budgets, each after the name of the option, would keep more; empty where none would."""
        verb = "would keep" if self.objective == "memory" else "would allow"
        counts = {_rounded_up(each.max_error): f"{verb} {each.modules} of {each.total}" for each in self.budgets}
        said = ", ".join(f"{option}{error} {count}" for error, count in counts.items())
        return said and f"Larger budgets, by the errors measured: {said} modules."

    def __str__(self) -> str:
        head = ("module", "rewrite", "kernel", "gain", "error", "", "reason")
        what, rows = "smaller" if self.objective == "memory" else "faster", []
        for e in self.entries:
            gain = describe_gain(e.gain, noise_share(e.gain, e.noise), what) if e.measured else "-"
            verdict = "kept" if e.kept else "back"
            reason = e.reason.removeprefix(gain).removeprefix(", ")  # the gain stands in its own column
            rows.append((e.module, e.rewrite, e.kernel, gain, f"{e.error:.1e}", verdict, reason))
        sizes = describe_gain(self.bytes_before / max(self.bytes_after, 1), 0.0, "smaller")
        told = (
            f"{self.model} on {self.device}: {self.seconds_before * 1e3:.2f} ms before, "
            f"{self.seconds_after * 1e3:.2f} ms after, {describe_gain(self.gain, noise_share(self.gain, self.noise))}; "
            f"{self.bytes_before / 2**20:.1f} MiB before, {self.bytes_after / 2**20:.1f} MiB after, {sizes}; "
            f"error {self.error:.1e} of at most {self.max_error:.1e}"
        )
        return "\n".join(filter(None, (self.note, *table(head, *rows), told, self.outlook())))


def _check_types(made: Any) -> None:
    """Raise `TypeError` for a text, number or flag of a file that is none: "false" would count as kept."""
    for each in fields(made):
        value = getattr(made, each.name)
        wanted: Any = (float, int) if each.type is float else each.type
        if each.type in (str, bool, int, float) and (
            not isinstance(value, wanted) or isinstance(value, bool) is not (each.type is bool)
        ):
            raise TypeError(f"{each.name} is {value!r:.60}, and no {each.type.__name__}")


def _rounded_up(error: float) -> str:
    """Return two digits of an error, which are not less than it."""
    digits = 1 - math.floor(math.log10(error)) if error else 0
    return f"{math.ceil(error * 10**digits) / 10**digits:g}"


def table(*rows: Sequence[str]) -> list[str]:
    """Return lines with the cells of each column below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
