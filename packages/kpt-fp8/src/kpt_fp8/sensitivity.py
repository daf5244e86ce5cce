"""What converting each layer by itself costs: `measure_sensitivity`."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError

from .experts import NativeFP8Experts, refusal
from .native_linear import NativeFP8Linear
from .quality import Quality, QualityMeter
from .report import Report
from .rewrites import EXPERTS, MIN_FEATURES, WEIGHTS, FP8Experts, FP8Linear, weight_is_read
from .selection import Chosen, Selection, patterns, require_module, require_some, select
from .trials import Effect, Loss, Trials, change_of_loss, each_batch, evaluating, mean_of, watch_output
from .weight_state import bytes_of

#: Called with the number of runs done, of all, and what runs next.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """A layer converted by itself.

    Attributes:
        name: in the model; the first one where the model shares the layer.
        granularity: what shares a scale of its weight.
        shape: of the weight, N and K; of experts that of all their first matrices, `[experts, N, K]`.
        bytes_before, bytes_after: of weight, scales and bias.
        output: quality of the layer's output on the inputs that it has in the model.
        error: of the model's output, `|after - before| / |before|` of the worst row.
        loss_change: of the model's loss, in its own unit; None where it has none.
    """

    name: str
    granularity: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    output: Quality
    error: float
    loss_change: float | None


@dataclass(frozen=True)
class SensitivityReport(Report):
    """Layers of a model, the one that costs most first.

    Attributes:
        layers: for each layer and granularity, by falling error of the model's output.
        skipped: by name, why another `nn.Linear`, or other experts, are not among them.
        loss: of the model as it is; None where it has none.
    """

    layers: tuple[LayerSensitivity, ...]
    skipped: dict[str, str]
    loss: float | None = None

    title: ClassVar[str] = "Sensitivity of layers, worst first"

    def head(self) -> tuple[str, ...]:  # noqa: D102
        last = ("perplexity",) if self.loss is not None else ()
        return ("layer", "scales", "shape", "output SQNR", "worst row", "model error", *last)

    def cells(self, layer: LayerSensitivity) -> tuple[str, ...]:
        """Return a row; perplexity is told by the factor that it changes by, as a percentage."""
        return (
            layer.name,
            layer.granularity,
            "x".join(map(str, layer.shape)),
            f"{layer.output.sqnr:.1f}",
            f"{layer.output.worst_row_sqnr:.1f}",
            f"{layer.error:.2%}",
            *(() if layer.loss_change is None else (f"{math.expm1(layer.loss_change):+.3%}",)),
        )

    def plotted(self, layer: LayerSensitivity) -> Quality:  # noqa: D102
        return layer.output


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer or a module of experts, and what it would become by a rewrite."""

    original: nn.Module
    layer: NativeFP8Linear | NativeFP8Experts
    name: str
    rewrite: FP8Linear | FP8Experts

    @property
    def granularity(self) -> str:
        """Return what shares a scale of the weight."""
        return self.rewrite.granularity

    @property
    def op(self) -> str:
        """Return the op that runs it."""
        return "fp8.linear" if isinstance(self.layer, NativeFP8Linear) else "moe.experts"

    @property
    def weight(self) -> Tensor:
        """Return the weight, of experts that of their first matrices."""
        return next(self.layer.parameters())


def measure_sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    *,
    granularities: Sequence[str] = ("row",),
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    min_features: int = MIN_FEATURES,
    loss: Loss | None = None,
    max_batches: int | None = None,
    progress: Progress | None = None,
) -> SensitivityReport:
    """Convert each linear layer, and each module of experts, by itself; measure its output's error and the model's.

    The model runs in evaluation mode without gradients, once for each layer, granularity and batch, and is left as it
    was. Beside it, its layers' codes are in memory, once for each granularity. All rows of the output count, those of
    padding as well: give a model that returns what matters, such as sentence embeddings.

    Args:
        model: with layers `nn.Linear`, or experts as transformers fuses them (they need kpt-moe).
        data: batches: a tensor, which the model is called with; a mapping of keyword arguments; or a list or tuple of
            positional ones. They must be few enough to stay in memory.
        granularities: of `row` and `128x128`.
        include: patterns of layers, as `convert_model_to_fp8` takes them.
        exclude: likewise; nothing is excluded by itself.
        min_features: likewise.
        loss: takes the model's output and the batch. None: `output.loss`, which models of transformers have where the
            batch holds labels. Its change is told as that of perplexity, which it is for a mean cross-entropy.
        max_batches: stop after so many; None takes all.
        progress: called with the number of runs done, of all, and what runs next.

    Raises:
        InputError: no layer to measure, or none that the data reach; no batch; a pattern describes no module; a layer
            can't be converted.
        UnknownNameError: no such granularity.
    """
    owner = "measure_sensitivity"
    batches = list(each_batch(owner, data, max_batches))
    candidates, skipped = candidates_of(owner, model, granularities, include, exclude, min_features)
    with evaluating(model):
        return sensitivity_of(Trials(owner, model, loss), candidates, batches, skipped, progress)


def candidates_of(
    owner: str,
    model: nn.Module,
    granularities: Sequence[str],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    min_features: int,
) -> tuple[list[Candidate], dict[str, str]]:
    """The converted layers in the model's order, and why others are left, see `measure_sensitivity`."""
    require_module(owner, model)
    if isinstance(granularities, str) or not granularities:
        raise InputError(f"{owner}: granularities must be names in a list, as in ['row']; got {granularities!r}")
    for granularity in granularities:
        if granularity not in WEIGHTS:
            raise UnknownNameError("granularity of a plan", granularity, WEIGHTS)
    excluded = patterns(owner, "exclude", exclude) or ()
    found = select(owner, model, patterns(owner, "include", include), excluded, min_features)
    skipped = dict(found.skipped)
    chosen: list[Chosen[nn.Linear]] = []
    for each in found.chosen:
        if any(weight_is_read(model, name) for name in each.names):
            skipped[each.names[0]] = "the module around it reads its weight"
        else:
            chosen.append(each)
    names = tuple(dict.fromkeys(granularities))
    experts: list[Chosen[nn.Module]] = []
    for stacked in found.experts:
        reason = next(filter(None, (refusal(stacked.module, name, torch.float8_e4m3fn) for name in names)), "")
        if reason:
            skipped[stacked.names[0]] = reason
        else:
            experts.append(stacked)
    require_some(owner, Selection(chosen, experts, skipped))
    made: list[tuple[Chosen[Any], FP8Linear | FP8Experts]] = [
        *((each, WEIGHTS[name]) for each in chosen for name in names),
        *((each, EXPERTS[name]) for each in experts for name in names),
    ]
    return [
        Candidate(each.module, cast(Any, rewrite.replacement(each.module)), each.names[0], rewrite)
        for each, rewrite in made
    ], skipped


def sensitivity_of(
    trials: Trials,
    candidates: Sequence[Candidate],
    batches: Sequence[Any],
    skipped: dict[str, str],
    progress: Progress | None,
) -> SensitivityReport:
    """The report, see `measure_sensitivity`; the model is in evaluation mode."""
    meters = [QualityMeter() for _ in candidates]
    effects: list[list[Effect]] = [[] for _ in candidates]
    losses: list[Effect] = []
    total, done = len(batches) * len(candidates), 0
    for batch in batches:
        with ExitStack() as stack:
            for index, candidate in enumerate(candidates):
                stack.callback(watch_output(candidate.original, candidate.layer, meters[index]))
            exact, loss = trials.exact(batch)
        losses.append(Effect(0.0, loss))
        for index, candidate in enumerate(candidates):
            if progress is not None:
                progress(done, total, f"{candidate.name} ({candidate.granularity})")
            if meters[index].called:
                effects[index].append(trials.with_layers([(candidate.original, candidate.layer)], batch, exact))
            done += 1
    if progress is not None:
        progress(total, total, "done")
    base = mean_of(losses).loss
    found = []
    for index, candidate in enumerate(candidates):
        if not meters[index].called:
            skipped.setdefault(candidate.name, "the data do not reach it")
            continue
        effect = mean_of(effects[index])
        found.append(
            LayerSensitivity(
                candidate.name,
                candidate.granularity,
                tuple(candidate.weight.shape),
                bytes_of(candidate.original),
                bytes_of(candidate.layer),
                meters[index].result(),
                effect.error,
                change_of_loss(effect.loss, base),
            )
        )
    if not found:
        raise InputError("measure_sensitivity: no layer was called: check the data and the model")
    found.sort(key=lambda layer: (-layer.error, layer.name, layer.granularity))
    return SensitivityReport(tuple(found), skipped, base)
