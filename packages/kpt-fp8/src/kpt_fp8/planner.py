"""Which layers go to FP8, and how: `plan_fp8` weighs what each costs with what it was measured to gain."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kpt_core import InputError

from .front import Option, Step, chosen_by, front_of
from .planned import Key, gain_of_layer, plan_of
from .rewrites import MIN_FEATURES
from .sensitivity import LayerSensitivity, Progress, SensitivityReport, candidates_of, sensitivity_of
from .timing import Timing, time_layers
from .trials import Effect, Loss, Trials, batches_of, evaluating, mean_of

if TYPE_CHECKING:
    from kpt_optimize import Plan

_OWNER = "plan_fp8"


@dataclass(frozen=True, slots=True)
class Point:
    """A choice of the Pareto front: all steps up to this one.

    Attributes:
        layer: that this step converts, or converts in another way.
        granularity: of its weight.
        layers: so many are converted.
        bytes_saved: of weights.
        seconds_saved: of the first batch, from the layers' times; negative where it takes longer.
        predicted_error: of the model's output, from the layers' sensitivities.
        error: the same, measured; None where it was not.
        loss_change: likewise of the loss.
    """

    layer: str
    granularity: str
    layers: int
    bytes_saved: int
    seconds_saved: float
    predicted_error: float
    error: float | None
    loss_change: float | None


@dataclass(frozen=True)
class Planning:
    """A plan, and what it was made from.

    Attributes:
        plan: `kpt_core.apply_plan(model, planning.plan)` converts a model by it; `plan.save` writes the file that
            `apply_plan` reads. Its errors are `|after - before| / |before|` of the worst row of the model's output;
            a layer's is that with this layer alone.
        front: the choices that nothing beats, of layers that gain something and alone are within the budget.
        chosen: how many of the front's steps the plan takes.
        sensitivity: of each layer.
    """

    plan: "Plan"
    front: tuple[Point, ...]
    chosen: int
    sensitivity: SensitivityReport

    def __str__(self) -> str:
        from kpt_optimize import table

        head = ("", "layers", "bytes saved", "ms saved", "predicted error", "error", "the step's layer")
        rows = [
            (
                ">" if number == self.chosen else "",
                str(point.layers),
                f"{point.bytes_saved:,}",
                f"{point.seconds_saved * 1e3:+.2f}",
                f"{point.predicted_error:.2%}",
                "" if point.error is None else f"{point.error:.2%}",
                f"{point.layer} ({point.granularity})",
            )
            for number, point in enumerate(self.front, start=1)
        ]
        left = len(self.sensitivity.skipped)
        more = [f"{left} others are left, see planning.sensitivity.skipped"] if left else []
        return "\n".join([*(table(head, *rows) if rows else ()), self._conclusion(), *more])

    def _conclusion(self) -> str:
        plan = self.plan
        if plan.kept:
            layers = f"{len(plan.kept)} of {len(plan.entries)} layers are converted"
            return f"{layers}; error {plan.error:.2%} of at most {plan.max_error:.2%}"
        nearest = min(plan.entries, key=lambda entry: entry.error)
        return f"no layer is converted; {nearest.module}: {nearest.reason}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": self.plan.as_dict(),
            "front": [asdict(point) for point in self.front],
            "chosen": self.chosen,
            "sensitivity": self.sensitivity.as_dict(),
        }


def plan_fp8(
    model: nn.Module,
    data: Iterable[Any],
    *,
    objective: str = "memory",
    max_error: float = 0.04,
    max_loss_change: float | None = None,
    granularities: Sequence[str] = ("row", "128x128"),
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    min_features: int = MIN_FEATURES,
    loss: Loss | None = None,
    max_batches: int | None = None,
    progress: Progress | None = None,
) -> Planning:
    """Choose the layers that gain most for the error they cost, as many as the budget allows.

    Each layer is converted by itself, and what that does to the model's output is measured; its time is measured once
    for each shape. Layers that alone cost more than the budget are left. From the others follow the choices that
    nothing beats, from one layer to all that gain something. The largest whose error, measured on all the data, is
    within the budget is found by bisection, and taken. At last the model is timed with it; a plan for latency that is
    slower as a whole converts nothing. Where nothing fits, the plan is empty, and `print` says why.

    The model runs once for each layer, granularity and batch, and is left as it was. Fused experts are not planned yet:
    `sensitivity.skipped` names them, and `convert_model_to_fp8` converts them.

    Args:
        model: with layers `nn.Linear`.
        data: batches, as `measure_sensitivity` takes them; the first is what is timed.
        objective: `memory`: bytes of weights; or `latency`: only layers that are faster by more than the noise.
        max_error: budget of the model's output: `|after - before| / |before|` of each row. 0.04 keeps the cosine of
            an embedding at 0.9992 at least.
        max_loss_change: budget of the loss as well; 0.01 is 1% of perplexity.
        granularities: of `row` and `128x128`: what a layer may become.
        include: patterns of layers, as `convert_model_to_fp8` takes them.
        exclude: likewise; nothing is excluded by itself, since what a layer costs is measured.
        min_features: likewise.
        loss: as `measure_sensitivity` takes it.
        max_batches: take so many of `data`; None takes all.
        progress: called with the number of runs done, of all, and what runs next.

    Raises:
        InputError: a budget is negative, `max_loss_change` without a loss, the model is a single `nn.Linear`, or as in
            `measure_sensitivity`.
        UnknownNameError: no such objective or granularity.
    """
    try:
        from kpt_optimize import check_max_error, check_objective
    except ModuleNotFoundError as error:
        raise ImportError("plan_fp8 needs kpt-optimize: pip install 'kpt-fp8[plan]'") from error

    check_objective(objective)
    check_max_error(max_error)
    if max_loss_change is not None and not max_loss_change >= 0:
        raise InputError(f"{_OWNER}: max_loss_change must be at least 0; got {max_loss_change!r}: 0.01 is 1%")
    if type(model) is nn.Linear:
        raise InputError(
            f"{_OWNER}: a single nn.Linear has no place to be replaced at: use NativeFP8Linear.from_linear"
        )
    batches = batches_of(_OWNER, data, max_batches)
    candidates, skipped = candidates_of(_OWNER, model, granularities, include, exclude, min_features)
    by_key = {(each.name, each.granularity): each for each in candidates}
    trials = Trials(_OWNER, model, loss)

    def allowed(error: float, change: float | None) -> bool:
        return error <= max_error and (max_loss_change is None or (change is not None and change <= max_loss_change))

    with evaluating(model):
        if max_loss_change is not None and trials.exact(batches[0])[1] is None:
            raise InputError(
                f"{_OWNER}: max_loss_change needs a loss; got a model whose output has none: put labels into the "
                "batches, or give loss"
            )
        report = sensitivity_of(trials, candidates, batches, skipped, progress)
        told = {key: layer for key in by_key for layer in report.layers if key == (layer.name, layer.granularity)}
        timings = time_layers(model, [by_key[key] for key in told], batches[0])
        within = {key: layer for key, layer in told.items() if allowed(layer.error, layer.loss_change)}
        steps = front_of(
            [
                Option(*key, gain, layer.error)
                for key, layer in within.items()
                if (gain := gain_of_layer(layer, timings.get(key), objective)) > 0
            ]
        )

        def measure(count: int) -> Effect:
            swaps = [(by_key[key].linear, by_key[key].layer) for key in chosen_by(steps[:count]).items()]
            return mean_of([trials.with_layers(swaps, batch, trials.exact(batch)[0]) for batch in batches])

        chosen, measured = _largest(
            len(steps), measure, lambda effect: allowed(effect.error, loss_change(effect, report.loss))
        )
        plan = plan_of(
            model,
            batches[0],
            candidates,
            chosen_by(steps[:chosen]),
            told,
            timings,
            objective=objective,
            within=within,
            max_error=max_error,
            error=measured[chosen].error if chosen else 0.0,
        )
    front = _points(steps, told, timings, measured, report.loss)
    return Planning(plan, front, chosen if plan.kept else 0, report)


def loss_change(effect: Effect, loss: float | None) -> float | None:
    """What was added to the loss; None without one, infinite where it is no number."""
    if loss is None or effect.loss is None:
        return None
    change = effect.loss - loss
    return math.inf if math.isnan(change) else change


def _largest(
    most: int, measure: Callable[[int], Effect], allowed: Callable[[Effect], bool]
) -> tuple[int, dict[int, Effect]]:
    """The largest count that is allowed, by bisection, and all that was measured on the way; 0 always is."""
    measured: dict[int, Effect] = {}
    low, high = 0, most + 1
    count = most
    while high - low > 1:
        measured[count] = measure(count)
        if allowed(measured[count]):
            low = count
        else:
            high = count
        count = (low + high) // 2
    return low, measured


def _points(
    steps: Sequence[Step],
    told: Mapping[Key, LayerSensitivity],
    timings: Mapping[Key, Timing],
    measured: Mapping[int, Effect],
    loss: float | None,
) -> tuple[Point, ...]:
    points = []
    for count, step in enumerate(steps, start=1):
        chosen = chosen_by(steps[:count])
        effect = measured.get(count)
        points.append(
            Point(
                step.option.name,
                step.option.granularity,
                len(chosen),
                sum(told[key].bytes_before - told[key].bytes_after for key in chosen.items()),
                sum(timings[key].before - timings[key].after for key in chosen.items() if key in timings),
                step.error,
                None if effect is None else effect.error,
                None if effect is None else loss_change(effect, loss),
            )
        )
    return tuple(points)
