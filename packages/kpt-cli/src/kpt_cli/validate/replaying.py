"""Record a golden trace of a model, replay it elsewhere, and find the modules that go wrong by themselves."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import distributions, version
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from kpt_cli.errors import CliError
from kpt_optimize.devices.machine import present
from kpt_optimize.judging import Call, Verdict, find_routing, judge, rounding

from .models import ORACLE, Arm
from .observing import (
    Arguments,
    Steer,
    Tell,
    device_of,
    following,
    forcing,
    in_float64,
    observe,
    placed,
    signs,
    widened,
)
from .trace import Trace, check_same_model, identity

FOLDED = 65_536  #: a gradient with more elements is folded to this many sums
#: As many flips are no finding, each explained by rounding, and twice as many more as the recorder has itself.
_FREE_FLIPS = 5
#: The root of three times the products of the forward, and three times more for sums over tokens that partly cancel.
_BACKWARD = 3
_AUTOMATIC = Arm()
_SILENT: Tell = lambda done, total, what: None  # noqa: E731


def record(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    arm: Arm = _AUTOMATIC,
    layers: str = "*",
    gradients: bool = False,
    tell: Tell = _SILENT,
    about: Mapping[str, str] = MappingProxyType({}),
) -> Trace:
    """Run a model and its float64 reference, and keep what every module gave.

    The reference has the same weights, widened, and runs on the CPU. Where its own choice of experts differs from the
    run's, it follows the run's: else everything after that token would differ, and no error could be told. It runs once
    as a whole, and once with every module fed what it was fed in the recorded run. Of modules that don't route, those
    are kept whose path matches the pattern `layers`. The model is put into evaluation mode.
    """
    given: Arguments = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    exact, wide, dtype = placed(given, "cpu", torch.float64), widened(model.eval()), _dtype(model)
    same = identity(model)  # as it is before a run, which may change buffers
    calls = observe(model, given, arm, "recording", tell)
    if not any(fnmatchcase(key, layers) for key in calls):
        raise CliError(f"--layers {layers}: no module has such a path; for instance {next(iter(calls))!r} is one")
    with in_float64():
        whole = observe(wide, exact, ORACLE, "float64", tell, steer=following(calls))
        alone = observe(wide, exact, ORACLE, "float64, each alone", tell, steer=forcing(calls))
    kept: dict[str, Call] = {}
    summed: list[int] = []
    for key, call in calls.items():
        summed += call.lengths
        wanted = fnmatchcase(key, layers) or find_routing(call.inputs) or find_routing(call.outputs)
        if wanted and key in whole and key in alone:
            sides = {"reference": whole[key].outputs, "alone": alone[key].outputs, "handed": alone[key].inputs}
            kept[key] = replace(call, rounding=rounding(summed, dtype), **sides)  # type: ignore[arg-type]
    slopes: list[Call] = []
    if gradients:
        # Both follow the recorded routing where they differ, so that no gradient flows through a choice there.
        here = _gradients(model, given, arm, following(kept), tell)
        with in_float64():
            there = _gradients(wide, exact, ORACLE, following(kept), tell)
        relative = _BACKWARD * rounding(summed, dtype)
        both = (key for key in here if key in there)
        slopes = [replace(here[key], reference=there[key].outputs, rounding=relative) for key in both]
    ours = sorted(found.name for found in distributions() if found.name.startswith("kpt-"))
    device, (args, kwargs) = device_of(model), placed(given, "cpu")
    facts = same | {
        **dict.fromkeys(("dtype", "load_dtype"), str(dtype).removeprefix("torch.")),
        "device": next((f"{d.device} ({d.name})" for d in present().devices if d.type == device.type), str(device)),
        "arm": arm.name,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", *ours)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Trace(
        about=facts | {**about}, args=args, kwargs=kwargs, layers=tuple(kept.values()), gradients=tuple(slopes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The findings of a replay."""

    verdicts: tuple[Verdict, ...]  # of every recorded call, in the order in which calls ended, then of gradients
    #: of modules that go wrong by themselves, fed what the recorder fed them; see `bisect`
    culprits: tuple[Verdict, ...]
    gradients_left_out: str = ""  # why gradients were not judged, `""` if they were or there are none

    @property
    def flipped(self) -> int:
        """Return how many tokens were routed otherwise than by the recorder, over all layers."""
        return sum(verdict.flips for verdict in self.verdicts)

    @property
    def flips_allowed(self) -> int:
        """Return how many flips chance explains: the recorder has flips of its own against float64."""
        return _FREE_FLIPS + 2 * sum(verdict.recorder_flips for verdict in self.verdicts)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Return the verdicts with a reason."""
        return tuple(verdict for verdict in self.verdicts if verdict.reason)

    @property
    def ok(self) -> bool:
        """Return whether this run is no worse than the recorder."""
        return not (self.failed or self.culprits) and self.flipped <= self.flips_allowed


def replay(model: nn.Module, trace: Trace, *, arm: Arm = _AUTOMATIC, tell: Tell = _SILENT) -> Replay:
    """Run the recorded inputs through the recorded model, in the recorded dtype, and judge it.

    Errors add up from module to module, for the recorder as for this run: both are compared at the same place of the
    same whole run. A token whose routing flipped is given the recorder's experts, so that all after it is compared.
    Every module is judged for itself too, where its error does not hide behind those before it.
    """
    culprits = bisect(model, trace, arm=arm, tell=tell)
    given, steer = (trace.args, trace.kwargs), following({layer.key: layer for layer in trace.layers})
    calls = observe(model, given, arm, "replaying", tell, steer=steer)
    verdicts = [judge(layer, calls.get(layer.key), layer.reference, layer.rounding) for layer in trace.layers]
    found = Replay(verdicts=tuple(verdicts), culprits=culprits)
    if trace.gradients and found.flipped:
        reason = f"{found.flipped} tokens were routed otherwise, which changes gradients for better or worse"
        return replace(found, gradients_left_out=reason)
    if trace.gradients:
        calls = _gradients(model, given, arm, steer, tell)
        verdicts += [judge(was, calls.get(was.key), was.reference, was.rounding) for was in trace.gradients]
    return replace(found, verdicts=tuple(verdicts))


def bisect(model: nn.Module, trace: Trace, *, arm: Arm = _AUTOMATIC, tell: Tell = _SILENT) -> tuple[Verdict, ...]:
    """Find the modules that go wrong by themselves, in the recorded model in the recorded dtype.

    The model runs once. Every module gets the recorded inputs, and hands on the recorded outputs, whatever it computed.
    So each is judged for what it does itself, and a block only for what it does between its children. Return verdicts
    of those that differ, in the order in which their calls end: a block's comes after that of what lies in it.
    """
    check_same_model(model.eval(), trace.about)
    layers = {layer.key: layer for layer in trace.layers}
    calls = observe(model, (trace.args, trace.kwargs), arm, "each alone", tell, steer=forcing(layers))
    dtype: torch.dtype = getattr(torch, trace.about["dtype"])
    found: dict[str, Verdict] = {}  # a block may go wrong at each of its children, and by itself
    for key, layer in layers.items():
        call, around = calls.get(key), _around(key, layers)
        # Implementations may differ in masks and the like, which are not compared then.
        inputs = [] if call is None else [call.inputs, layer.inputs, layer.handed]
        alike = len({tuple((x.shape, x.is_floating_point()) for x in side) for side in inputs}) == 1
        if call is not None and alike and around in layers.keys() & calls.keys():
            # What code between modules computes for a module, attention for its output projection, no module gives.
            before, now = replace(layers[around], outputs=layer.inputs), replace(calls[around], outputs=call.inputs)
            verdict = judge(before, now, layer.handed, rounding(before.lengths, dtype))
            if verdict.reason:
                found.setdefault(around, replace(verdict, reason=f"what it hands to {key}: {verdict.reason}"))
        verdict = judge(layer, call, layer.alone, rounding(layer.lengths, dtype))
        if verdict.reason:
            found.setdefault(key, verdict)
    return tuple(found.values())


def _around(key: str, layers: Mapping[str, Call]) -> str:
    """Return the key of the nearest module around a call's that was recorded, which may skip containers."""
    path = key.partition("#")[0].rpartition(".")[0]
    while path and path not in layers:
        path = path.rpartition(".")[0]
    return path


def _gradients(model: nn.Module, given: Arguments, arm: Arm, steer: Steer, tell: Tell) -> dict[str, Call]:
    model.zero_grad(set_to_none=True)
    try:
        observe(model, given, arm, "gradients", tell, steer=steer, backward=True)
        return {
            name: Call(key=name, type="gradient", outputs=(fold(parameter.grad),))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
    finally:
        model.zero_grad(set_to_none=True)


def fold(gradient: Tensor) -> Tensor:
    """Return the gradient itself if it is small, else `FOLDED` sums of its elements with fixed signs, in float64.

    Each element goes into one sum, so that an error anywhere, a NaN too, is an error of a sum; and the sum of squares
    of errors stays what it is, on average over signs.
    """
    if gradient.numel() <= FOLDED:
        return gradient.detach().to("cpu", copy=True).contiguous()
    total = torch.zeros(FOLDED, dtype=torch.float64)
    for turn, part in enumerate(gradient.detach().cpu().flatten().split(FOLDED)):
        total[: len(part)] += part.double() * signs(len(part), turn)
    return total


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's floating parameters, float32 if it has none."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in filter(Tensor.is_floating_point, model.parameters()):
        counts[parameter.dtype] += parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
