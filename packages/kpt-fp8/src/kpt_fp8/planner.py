"""Choose which layers go to FP8, and how: `plan_fp8` weighs what each costs with what it was measured to gain."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

from torch import nn

from kpt_core import InputError

from .rewrites import MIN_FEATURES
from .selection import require_parent
from .sensitivity import Candidate, LayerSensitivity, Progress, SensitivityReport, candidates_of, sensitivity_of
from .trials import Loss, Trials, call, change_of_loss, each_batch, evaluating, mean_of

try:
    import kpt_optimize
    from kpt_optimize.attempt import first_calls
    from kpt_optimize.pareto import Version, in_force, pareto
except ModuleNotFoundError as error:
    raise ImportError("plan_fp8 needs kpt-optimize: pip install './packages/kpt-fp8[plan]'") from error

_OWNER = "plan_fp8"


@dataclass(frozen=True, slots=True)
class Point:
    """A choice of the Pareto front: all steps up to this one.

    Attributes:
        layer: that this step converts, or converts in another way.
        granularity: of its weight.
        layers: so many are converted.
        bytes_saved: of weights.
        seconds_saved: of one call of each layer; negative where it takes longer.
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
        plan: `kpt_optimize.apply_plan(model, planning.plan)` converts a model by it; `plan.save` writes the file that
            `apply_plan` reads. It has an entry for each layer and granularity. Its errors are
            `|after - before| / |before|` of the worst row of the model's output; a layer's is that with this layer
            alone.
        front: the choices that nothing beats, of layers that gain something and alone are within the budget.
        chosen: how many of the front's steps the plan takes.
        sensitivity: of each layer.
    """

    plan: kpt_optimize.Plan
    front: tuple[Point, ...]
    chosen: int
    sensitivity: SensitivityReport

    def __str__(self) -> str:
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
        if self.plan.kept:
            layers = f"{len(self.plan.kept)} of {len({entry.module for entry in self.plan.entries})} layers"
            last = f"{layers} are converted; error {self.plan.error:.2%} of at most {self.plan.max_error:.2%}"
        else:
            nearest = min(self.plan.entries, key=lambda entry: entry.error)
            last = f"no layer is converted; {nearest.module}: {nearest.reason}"
        outlook = "" if self.plan.kept else self.plan.outlook()  # else the table tells what comes next
        left = len(self.sensitivity.skipped)
        more = f"{left} others are left, see planning.sensitivity.skipped" if left else ""
        return "\n".join(filter(None, (*(kpt_optimize.table(head, *rows) if rows else ()), last, outlook, more)))

    def as_dict(self) -> dict[str, Any]:
        """Return a document for JSON."""
        return asdict(self) | {"plan": self.plan.as_dict()}


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

    Each layer is converted by itself, and what that does to the model's output is measured. Layers that alone cost more
    than the budget are left; the time of the others is measured once for each shape, on their first call. From those
    that gain something follow the choices that nothing beats. The largest whose error, measured on all the data, is
    within the budget is found by bisection, and taken. At last the model is timed with it; a plan for latency that is
    slower as a whole converts nothing. Where nothing fits, the plan is empty, and `print` says why.

    The model runs once for each layer, granularity and batch, and is left as it was.

    Args:
        model: with layers `nn.Linear`, or experts as transformers fuses them (they need kpt-moe).
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
    kpt_optimize.check_objective(objective)
    kpt_optimize.check_max_error(max_error)
    if max_loss_change is not None and not max_loss_change >= 0:
        raise InputError(f"{_OWNER}: max_loss_change must be at least 0; got {max_loss_change!r}: 0.01 is 1%")
    require_parent(_OWNER, model, "NativeFP8Linear")
    batches = list(each_batch(_OWNER, data, max_batches))
    candidates, skipped = candidates_of(_OWNER, model, granularities, include, exclude, min_features)
    trials = Trials(_OWNER, model, loss)
    task = kpt_optimize.Task(kpt_optimize.Example((), {}), "balanced", objective, max_error)
    load = kpt_optimize.Load()
    with evaluating(model):
        if max_loss_change is not None and trials.exact(batches[0])[1] is None:
            raise InputError(
                f"{_OWNER}: max_loss_change needs a loss; got a model whose output has none: put labels into the "
                "batches, or give loss"
            )
        report = sensitivity_of(trials, candidates, batches, skipped, progress)

        def cost(error: float, loss_change: float | None) -> float:
            fits = max_loss_change is None or (loss_change is not None and loss_change <= max_loss_change)
            return error if fits else inf

        def measure(versions: Sequence[Version]) -> float:
            swaps = [(each.before, each.after) for each in versions]
            effect = mean_of([trials.with_layers(swaps, batch, trials.exact(batch)[0]) for batch in batches])
            effects[tuple(versions)] = told = effect.error, change_of_loss(effect.loss, report.loss)
            return cost(*told)

        effects: dict[tuple[Version, ...], tuple[float, float | None]] = {}
        costs = {(each.name, each.granularity): (each, cost(each.error, each.loss_change)) for each in report.layers}
        versions = _try_versions(model, candidates, costs, batches, task)
        plan, steps, chosen = pareto(model, versions, measure, lambda: call(model, batches[0]), task, load)
    granularity = {each.rewrite.name: each.granularity for each in candidates}
    front = []
    for count, step in enumerate(steps, start=1):
        now = in_force(steps[:count])
        front.append(
            Point(
                step.entry.module,
                granularity[step.entry.rewrite],
                len(now),
                sum(each.bytes for each in now),
                sum(each.seconds for each in now),
                sum(each.error**2 for each in now) ** 0.5,
                *effects.get(now, (None, None)),
            )
        )
    return Planning(plan, tuple(front), chosen, report)


class _VersionTrial(kpt_optimize.ModuleTrial):
    """A version of a layer, which is refused for what it costs the model, and timed once for each shape."""

    cost = ""
    granularity: str
    known: dict[tuple[int, str], Sequence[Sequence[float]]]

    def error(self, candidate: nn.Module) -> float:
        """Run the layer; what that does to the model is measured already."""
        super().error(candidate)
        if self.cost:
            raise kpt_optimize.RejectedError(f"alone it costs more than the budget: {self.cost}")
        return 0.0

    def times(self, before: nn.Module, after: nn.Module) -> Sequence[Sequence[float]]:
        """Return seconds of a call of each; layers of equal shapes share their call."""
        key = id(self._call), self.granularity
        if key not in self.known:
            self.known[key] = super().times(before, after)
        return self.known[key]


def _try_versions(
    model: nn.Module,
    candidates: Sequence[Candidate],
    costs: Mapping[tuple[str, str], tuple[LayerSensitivity, float]],
    batches: Sequence[Any],
    task: kpt_optimize.Task,
) -> list[Version]:
    """Try what the data reach, in the model's order; there are no seconds of what is over the budget."""
    reached = {each: costs[key] for each in candidates if (key := (each.name, each.granularity)) in costs}
    runs = [partial(call, model, batch) for batch in batches]
    calls = first_calls({each.original for each in reached}, runs, _kind)
    versions = []
    known: dict[tuple[int, str], Sequence[Sequence[float]]] = {}
    for each, (layer, cost) in reached.items():
        trial = _VersionTrial(model, each.original, kpt_optimize.Site(each.name, each.op), calls[each.original], task)
        trial.known, trial.granularity = known, each.granularity
        if not cost <= (task.max_error or 0.0):
            loss = "" if layer.loss_change is None else f", loss {layer.loss_change:+.2g}"
            trial.cost = f"error {layer.error:.2%}{loss}"
        tried, _ = trial.attempt(each.rewrite.name, partial(getattr, each, "layer"), lossless=False)
        before, after = map(median, trial.times(each.original, each.layer)) if tried.kept else (0.0, 0.0)
        saved, seconds = layer.bytes_before - layer.bytes_after, before - after
        gain = saved if task.objective == "memory" else seconds
        entry = replace(tried, error=layer.error)
        versions.append(Version(entry, each.original, each.layer, saved, seconds, gain, cost))
    return versions


def _kind(layer: nn.Module, call: kpt_optimize.Example) -> Hashable:
    """Tell calls of linear layers apart by shapes alone: what experts cost depends on numbers, by the routing."""
    if not isinstance(layer, nn.Linear):
        return layer
    x = call.args[0] if call.args else call.kwargs["input"]
    return x.shape, x.stride(), x.dtype, x.device, *((each.shape, each.dtype) for each in layer.parameters())
