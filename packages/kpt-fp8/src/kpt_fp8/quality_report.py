"""How well the layers of a converted model stand for the original's: `quality_report`."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kpt_core import InputError

from .experts import NativeFP8Experts, is_stacked, is_transposed
from .native_linear import NativeFP8Linear
from .quality import Quality, QualityMeter, sqnr
from .report import Report
from .selection import require_module
from .trials import call, each_batch, evaluating, watch_output

_OWNER = "quality_report"
#: A weight: its name, what it was, what gives its numbers now, and what shares a scale.
_Held = tuple[str, Tensor, Callable[[], Tensor], str]


@dataclass(frozen=True, slots=True)
class RowQuality:
    """A row of a weight: its number, its SQNR in dB, and `|after - before| / |before|` in Euclidean norms.

    Rows of experts are counted through: row r of expert e is number `e * N + r`.
    """

    row: int
    sqnr: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """A converted layer, or one of the two weights of converted experts.

    Attributes:
        name: in the model; of experts that of the weight.
        granularity: what shares a scale of its weight.
        shape: of the weight, N and K, or `[experts, N, K]`.
        weight: its quality.
        relative_error: of the weight, `|after - before| / |before|`.
        worst_rows: of the weight, worst first.
        output: quality on the inputs that the layer, or the experts, have in the original model; None without data, or
            where they do not reach it.
    """

    name: str
    granularity: str
    shape: tuple[int, ...]
    weight: Quality
    relative_error: float
    worst_rows: tuple[RowQuality, ...]
    output: Quality | None


@dataclass(frozen=True)
class QualityReport(Report):
    """Layers of a converted model, that with the worst row first: of its output, without data of its weight.

    Attributes:
        layers: the layers.
    """

    layers: tuple[LayerQuality, ...]

    title: ClassVar[str] = "Quality of layers in dB, worst first"

    def head(self) -> tuple[str, ...]:  # noqa: D102
        return "layer", "scales", "shape", "weight", "relative error", "worst rows", "output", "its worst row"

    def cells(self, layer: LayerQuality) -> tuple[str, ...]:  # noqa: D102
        output = layer.output
        return (
            layer.name,
            layer.granularity,
            "x".join(map(str, layer.shape)),
            f"{layer.weight.sqnr:.1f}",
            f"{layer.relative_error:.2%}",
            ", ".join(f"{row.row}: {row.sqnr:.1f}" for row in layer.worst_rows),
            *(("", "") if output is None else (f"{output.sqnr:.1f}", f"{output.worst_row_sqnr:.1f}")),
        )

    def plotted(self, layer: LayerQuality) -> Quality:
        """Return the output's quality, or the weight's where there is none."""
        return layer.output or layer.weight


def quality_report(
    original: nn.Module, converted: nn.Module, data: Iterable[Any] | None = None, *, rows: int = 3
) -> QualityReport:
    """Compare the linear layers and experts of a converted model with those that they were made from.

    Args:
        original: with layers `nn.Linear`, or fused experts, of the same names; it is left as it was.
        converted: by `convert_model_to_fp8` or a plan.
        data: batches, as `calibrate` takes them; with them the original runs in evaluation mode, and outputs are
            compared as well, each layer's on the inputs that it has there.
        rows: how many of each weight's worst rows are told.

    Raises:
        InputError: no layer was converted, the original has no `nn.Linear` or experts of that name and shape, `data`
            has no batch, or `rows` is negative.
    """
    if rows < 0:
        raise InputError(f"{_OWNER}: rows must be at least 0; got {rows}: 3 is usual")
    require_module(_OWNER, original)
    require_module(_OWNER, converted)
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
    weights: dict[str, list[_Held]] = {}
    modules = dict(original.named_modules(remove_duplicate=False))
    for name, layer in converted.named_modules():
        if isinstance(layer, NativeFP8Linear):
            linear = _original_of(name, modules.get(name), layer)
            held = layer.weight
            pairs[name] = linear, layer
            weights[name] = [(name, linear.weight.detach(), held.dequantize, held.granularity)]
        elif isinstance(layer, NativeFP8Experts):
            weights[name] = _weights_of(name, modules.get(name), layer)
            pairs[name] = modules[name], layer
    if not pairs:
        got = type(converted).__name__
        raise InputError(
            f"{_OWNER}: converted must have NativeFP8Linear or NativeFP8Experts; got a {got} without: convert it first"
        )
    outputs = {} if data is None else _outputs(original, pairs, list(each_batch(_OWNER, data, None)))
    layers = []
    for module, own in weights.items():
        for name, exact, dequantized, granularity in own:
            before, after = exact.flatten(0, -2), dequantized().flatten(0, -2)
            weight = sqnr(before, after)
            layers.append(
                LayerQuality(
                    name,
                    granularity,
                    tuple(exact.shape),
                    weight,
                    float(10 ** (-weight.sqnr / 20)),
                    _worst_rows(before, after, rows),
                    outputs.get(module),
                )
            )
    layers.sort(key=lambda layer: ((layer.output or layer.weight).worst_row_sqnr, layer.name))
    return QualityReport(tuple(layers))


def _original_of(name: str, linear: nn.Module | None, layer: NativeFP8Linear) -> nn.Linear:
    shape = [layer.out_features, layer.in_features]
    plain = isinstance(linear, nn.Linear) and not isinstance(linear, NativeFP8Linear) and not linear.weight.is_meta
    if plain and isinstance(linear, nn.Linear):
        if list(linear.weight.shape) == shape:
            return linear
        found = f"an nn.Linear of {list(linear.weight.shape)}"
    else:
        found = "nothing" if linear is None else f"a {type(linear).__name__} without numbers that could be compared"
    raise InputError(
        f"{_OWNER}: original must have an nn.Linear of {shape} at {name!r}; got {found}: give the model that converted "
        "was made from, not changed since"
    )


def _weights_of(name: str, experts: nn.Module | None, layer: NativeFP8Experts) -> list[_Held]:
    """Return the names of the two weights, what they were, `[experts, N, K]`, and what they are."""
    found: list[_Held] = []
    module: Any = experts
    for own, _ in layer.projections() if module is not None and is_stacked(module) else ():
        exact = getattr(module, own, torch.empty(0, device="meta")).detach()
        exact = exact.mT if is_transposed(module) else exact
        if layer.interleaved and own == "gate_up_proj":
            exact = exact.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        if exact.shape == getattr(layer, own).shape and not exact.is_meta:
            found.append((f"{name}.{own}", exact, partial(layer.dequantize, own), layer.granularity))
    if len(found) < len(layer.projections()):
        got = "nothing" if experts is None else f"a {type(experts).__name__} of other numbers"
        raise InputError(
            f"{_OWNER}: original must have experts at {name!r} as those that converted has; got {got}: give the model "
            "that converted was made from, not changed since"
        )
    return found


def _outputs(model: nn.Module, pairs: dict[str, tuple[nn.Module, nn.Module]], batches: list[Any]) -> dict[str, Quality]:
    meters = {name: QualityMeter() for name in pairs}
    with evaluating(model), ExitStack() as stack:
        for name, (module, layer) in pairs.items():
            stack.callback(watch_output(module, layer, meters[name]))
        for batch in batches:
            call(model, batch)
    return {name: meter.result() for name, meter in meters.items() if meter.called}


def _worst_rows(exact: Tensor, after: Tensor, rows: int) -> tuple[RowQuality, ...]:
    numbers = exact.to(torch.float64)
    noise, signal = (after.to(torch.float64) - numbers).norm(dim=1), numbers.norm(dim=1)
    errors = torch.where(noise == 0, 0.0, noise / signal)
    worst = errors.topk(min(rows, errors.numel()))
    return tuple(
        RowQuality(int(row), -20 * math.log10(error) if error else math.inf, error)
        for row, error in zip(worst.indices.tolist(), worst.values.tolist(), strict=True)
    )
