"""A choice of layers as a plan of the core, which `kpt_core.apply_plan` applies and `revert` takes back."""

import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .rewrites import WEIGHTS
from .sensitivity import Candidate, LayerSensitivity
from .timing import Timing
from .trials import call

if TYPE_CHECKING:
    from kpt_optimize import Plan, PlanEntry

#: A layer's name and a granularity.
Key = tuple[str, str]
#: Seconds of timing the whole model.
_SECONDS = 2.0


def gain_of_layer(layer: LayerSensitivity, timing: Timing | None, objective: str) -> float:
    """Bytes or seconds that a layer saves; 0 where it is not faster by more than the noise."""
    if objective == "memory":
        return layer.bytes_before - layer.bytes_after
    faster = timing is not None and timing.gain > 1 + 2 * timing.noise
    return timing.before - timing.after if timing is not None and faster else 0.0


def plan_of(
    model: nn.Module,
    batch: Any,
    candidates: Sequence[Candidate],
    chosen: Mapping[str, str],
    told: Mapping[Key, LayerSensitivity],
    timings: Mapping[Key, Timing],
    *,
    objective: str,
    within: Collection[Key],
    max_error: float,
    error: float,
) -> "Plan":
    """Time the model without and with the chosen layers, and write down what was decided for each.

    Args:
        model: in evaluation mode; it is left as it was.
        batch: what it runs on.
        candidates: all layers, in the model's order.
        chosen: by name, the granularity.
        told: sensitivities.
        timings: times.
        objective: `latency` or `memory`.
        within: what alone is within the budget.
        max_error: the budget.
        error: of the model's output with the chosen layers, measured.
    """
    from kpt_core import __version__
    from kpt_optimize import Plan, device_of, gain_of, interleaved_times, parameter_bytes, setback
    from kpt_optimize.changes import Changes

    from . import __version__ as own_version

    changes = Changes(model)

    def before() -> None:
        changes.show_original()
        call(model, batch)

    def after() -> None:
        changes.show_changed()
        call(model, batch)

    device = device_of(model)
    bytes_before = bytes_after = parameter_bytes(model)
    try:
        for candidate in candidates:
            if chosen.get(candidate.name) == candidate.granularity:
                changes.swap(WEIGHTS[candidate.granularity].name, candidate.name, candidate.layer)
        original, changed = interleaved_times((before, after), device, seconds=_SECONDS)
        changes.show_changed()
        bytes_after = parameter_bytes(model)
    finally:
        changes.revert()
    entries = _entries(chosen, told, timings, objective, within)
    reason = setback((original, changed), (bytes_before, bytes_after), objective, "layers") if chosen else None
    if reason is not None:
        entries = [replace(entry, kept=False, reason=reason) if entry.kept else entry for entry in entries]
    if reason is not None or not chosen:
        changed, bytes_after, error = original, bytes_before, 0.0
    gain, noise = gain_of(original, changed)
    return Plan(
        model=type(model).__name__,
        level="balanced",
        objective=objective,
        device=str(device),
        max_error=max_error,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kpt-core": __version__,
            "kpt-fp8": own_version,
        },
        entries=tuple(entries),
        seconds_before=statistics.median(original),
        seconds_after=statistics.median(changed),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        error=error,
        gain=gain,
        noise=noise,
    )


def _entries(
    chosen: Mapping[str, str],
    told: Mapping[Key, LayerSensitivity],
    timings: Mapping[Key, Timing],
    objective: str,
    within: Collection[Key],
) -> list["PlanEntry"]:
    """For each layer the version that was chosen, else the one that costs least."""
    from kpt_optimize import PlanEntry

    entries = []
    for name in dict.fromkeys(name for name, _ in told):
        versions = [layer for layer in told.values() if layer.name == name]
        layer = next(
            (each for each in versions if chosen.get(name) == each.granularity),
            min(versions, key=lambda each: each.error),
        )
        timing = timings.get((name, layer.granularity))
        what, gain, noise = "smaller", layer.bytes_before / layer.bytes_after, 0.0
        if objective == "latency":
            what, gain, noise = ("faster", timing.gain, timing.noise) if timing is not None else ("faster", 1.0, 0.0)
        kept = name in chosen
        if kept:
            reason = f"{gain:.2f}x {what}"
        elif gain_of_layer(layer, timing, objective) > 0:
            cost = f"error {layer.error:.2%}" + (
                "" if layer.loss_change is None else f", loss {layer.loss_change:+.2g}"
            )
            reason = f"{gain:.2f}x {what}, but alone it costs more than the budget: {cost}"
            if (name, layer.granularity) in within:
                reason = f"{gain:.2f}x {what}, and others gain more for the error that the budget allows"
        else:
            reason = f"{gain:.2f}x: not {what} by more than the noise ({2 * noise:.1%})"
        kernel = "" if timing is None else timing.kernel
        rewrite = WEIGHTS[layer.granularity].name
        entries.append(PlanEntry(name, rewrite, "fp8.linear", kernel, gain, layer.error, kept, reason, noise))
    return entries
