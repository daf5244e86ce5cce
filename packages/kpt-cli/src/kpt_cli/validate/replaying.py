"""Replay a golden trace: run the recorded inputs here, and judge every module beside the recorder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .arms import Arm
from .bisecting import Culprit, culprits_of
from .float64 import cast
from .gradients import run_backward
from .judging import Verdict, judge
from .observing import Observer
from .recording import Tell, call_of, must_run, observe, silent
from .steering import following
from .trace import About, Trace
from .weights import check_same_model

#: As many flips are no finding, each explained by rounding, and twice as many more as the recorder has itself.
_FREE_FLIPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay found.

    Attributes:
        about: what was recorded.
        verdicts: of every recorded call, in the order in which calls ended, then of gradients.
        culprits: modules that go wrong by themselves, fed what the recorder fed them; see `bisect`.
        gradients_left_out: why gradients were not judged, `""` if they were or there are none.
    """

    about: About
    verdicts: tuple[Verdict, ...]
    culprits: tuple[Culprit, ...]
    gradients_left_out: str = ""

    @property
    def flipped(self) -> int:
        """How many tokens were routed otherwise than by the recorder, over all layers."""
        return sum(len(verdict.flips) for verdict in self.verdicts)

    @property
    def unexplained(self) -> int:
        """How many of them by a gap that rounding does not explain."""
        return sum(not flip.explained for verdict in self.verdicts for flip in verdict.flips)

    @property
    def flips_allowed(self) -> int:
        """How many flips chance explains: the recorder has flips of its own against float64."""
        return _FREE_FLIPS + 2 * sum(verdict.recorder_flips for verdict in self.verdicts)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """Verdicts that are not ok."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)

    @property
    def ok(self) -> bool:
        """Whether this run is no worse than the recorder."""
        return not (self.failed or self.culprits or self.unexplained) and self.flipped <= self.flips_allowed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "layers": [verdict.as_dict() for verdict in self.verdicts],
            "culprits": [culprit.as_dict() for culprit in self.culprits],
            "flipped": self.flipped,
            "flips_unexplained": self.unexplained,
            "flips_allowed": self.flips_allowed,
            "gradients_left_out": self.gradients_left_out,
        }


def replay(
    model: nn.Module, trace: Trace, *, arm: Arm | None = None, dtype: torch.dtype | None = None, tell: Tell = silent
) -> Replay:
    """Run the recorded inputs through a model and judge it.

    Errors add up from module to module, for the recorder as for this run: both are compared at the same place of the
    same whole run. A token whose routing flipped is given the recorder's experts, so that all after it is compared.
    Then every module is judged once more for itself, on the inputs that it had when the trace was recorded: what is
    little beside all that came before it in a deep model is much beside its own.

    Args:
        model: the recorded model, in the recorded dtype; it is put into evaluation mode.
        trace: what was recorded.
        arm: what serves experts and ops; KPT's kernels, chosen automatically, if None.
        dtype: convert the model to it, in place, after its weights were checked.
        tell: told how far it is.

    Raises:
        CliError: the model is another one, or does not run.
        KptError: the arm names what is not installed or can't run.
    """
    arm = arm or Arm()
    check_same_model(model, trace.about)
    recorded_dtype: torch.dtype = getattr(torch, trace.about.dtype)
    if dtype is not None and dtype is not recorded_dtype:
        cast(model, dtype, only=recorded_dtype)
    model.eval()
    steer = following(trace.layers)
    calls = {
        call.key: call for call in observe(model, call_of(trace, model, dtype), arm, steer, tell, "replaying").calls
    }
    verdicts = []
    for layer in trace.layers:
        call = calls.get(layer.key)
        outputs, kernels = (None, ()) if call is None else (call.outputs, call.kernels)
        verdicts.append(judge(layer, outputs, layer.reference, layer.upto.relative(recorded_dtype), kernels))
    found = Replay(about=trace.about, verdicts=tuple(verdicts), culprits=culprits_of(model, trace, arm, tell, dtype))
    if not trace.gradients:
        return found
    if found.flipped:
        reason = f"{found.flipped} tokens were routed otherwise, which changes gradients for better or worse"
        return replace(found, gradients_left_out=reason)
    tell(0, None, "gradients")
    with arm.running(model), Observer(model, steer), must_run(model, "gradients"):
        gradients: Mapping[str, Tensor] = dict(run_backward(model, *call_of(trace, model, dtype)))
    for layer in trace.gradients:
        given = (gradients[layer.key],) if layer.key in gradients else None
        verdicts.append(judge(layer, given, layer.reference, layer.upto.relative(recorded_dtype)))
    return replace(found, verdicts=tuple(verdicts))
