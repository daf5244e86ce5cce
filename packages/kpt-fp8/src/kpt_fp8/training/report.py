"""What an engine did and why: values that print as sentences."""

from dataclasses import dataclass

from kpt_core import KptError

TAKEN, SKIPPED, ACCUMULATED = "taken", "skipped", "accumulated"


class DivergedError(KptError, RuntimeError):
    """Too many steps in a row were skipped: training can't go on as it is."""


@dataclass(frozen=True, slots=True)
class Escalation:
    """A layer began to quantise less.

    Attributes:
        step: of the engine, counted from 1, skipped ones too.
        layer: its name.
        before, after: names of recipes.
        reason: a sentence.
    """

    step: int
    layer: str
    before: str
    after: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.layer} from {self.before} to {self.after}: {self.reason}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of a call of `step`.

    Attributes:
        outcome: `taken`; `skipped`: parameters and optimizer are as before; `accumulated`: more batches are to come.
        reason: why a step was skipped; else empty.
        loss_scale: of the next step.
        escalations: of layers, because of this step.
    """

    outcome: str
    loss_scale: float
    reason: str = ""
    escalations: tuple[Escalation, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer, as it was observed last: of input, weight and gradient, in this order.

    Attributes:
        name: in the model.
        recipe: name of it.
        saturated: shares of codes that saturated under a delayed scale in the last step.
        zeros: shares of codes that were zero in it: numbers that underflowed, and zeros.
        errors: mean over rows of the relative error, when it was measured last; 0 before.
    """

    name: str
    recipe: str
    saturated: tuple[float, ...]
    zeros: tuple[float, ...]
    errors: tuple[float, ...]

    def __str__(self) -> str:
        shown = "  ".join(
            f"{name} {' '.join(f'{100 * value:.2f}' for value in values)} %"
            for name, values in (("error", self.errors), ("zeros", self.zeros), ("saturated", self.saturated))
        )
        return f"{self.name}  {self.recipe}  {shown}"


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What an engine did so far.

    Attributes:
        steps: of the optimizer that were tried.
        skipped: of them.
        last_skips: the last ones, as sentences.
        escalations: all of them.
        layers: greatest error first.
    """

    steps: int
    skipped: int
    last_skips: tuple[str, ...]
    escalations: tuple[Escalation, ...]
    layers: tuple[LayerState, ...]

    def __str__(self) -> str:
        first = f"{self.steps} steps, {self.skipped} skipped"
        return "\n".join([first, *self.last_skips, *map(str, self.escalations), *map(str, self.layers)])
