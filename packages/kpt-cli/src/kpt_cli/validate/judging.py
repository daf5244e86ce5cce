"""Judge a run beside the recorder's, module by module: both against float64, with what rounding explains."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .bounds import Errors
from .routing import Flip, by_expert, differing_rows, find_flips, find_routing
from .trace import Layer

_NONE = Errors(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one call of a module.

    Attributes:
        key: path of the module, with `#2` and so on for further calls; of a gradient, what it belongs to.
        type: the module's class, or `gradient`.
        ok: whether the run is no worse than the recorder.
        reason: what is wrong, `""` if nothing is.
        recorder: the recorder's errors against float64.
        run: this run's.
        bound: what this run may err.
        recorded_kernels: what served KPT's ops for the recorder.
        kernels: what serves them in this run.
        flips: tokens whose routing differs from the recorder's.
        recorder_flips: how many tokens the recorder routed otherwise than float64.
        routed: how many tokens were routed.
    """

    key: str
    type: str
    ok: bool
    reason: str = ""
    recorder: Errors = _NONE
    run: Errors = _NONE
    bound: Errors = _NONE
    recorded_kernels: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    flips: tuple[Flip, ...] = ()
    recorder_flips: int = 0
    routed: int = 0

    @property
    def used(self) -> float:
        """How much of the bound is used; over 1 is too much."""
        return self.run.ratio(self.bound)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"used": self.used}


def judge(
    layer: Layer,
    outputs: Sequence[Tensor] | None,
    reference: Sequence[Tensor],
    relative: float,
    kernels: tuple[str, ...] = (),
) -> Verdict:
    """Judge one call.

    Args:
        layer: the recorder's.
        outputs: this run's; None if it made no such call.
        reference: float64's, on the inputs that both had.
        relative: the relative error that rounding explains, see `Rounding`.
        kernels: what served KPT's ops in this run.
    """
    plain = Verdict(key=layer.key, type=layer.type, ok=True, recorded_kernels=layer.kernels, kernels=kernels)
    if outputs is None:
        return replace(plain, ok=False, reason="the recorder ran it and this run did not")
    shapes, exact_shapes, recorded_shapes = map(_shapes, (outputs, reference, layer.outputs))
    if shapes != recorded_shapes or shapes != exact_shapes:
        reason = f"it gave shapes {shapes}; recorded {recorded_shapes}, in float64 {exact_shapes}"
        return replace(plain, ok=False, reason=reason)
    routing = find_routing(layer.outputs)
    if routing is None:
        verdicts = [
            _judge_tensor(plain, value, was, exact, None, relative)
            for value, was, exact in zip(outputs, layer.outputs, reference, strict=True)
        ]
    else:
        index, was, exact = (tensors[routing.index] for tensors in (outputs, layer.outputs, reference))
        limit = _explained_gap(routing.logits, layer.outputs, reference, relative)
        other, recorder_other = differing_rows(index, was), differing_rows(was, exact)
        plain = replace(
            plain,
            flips=find_flips(index, was, exact, None if routing.logits is None else reference[routing.logits], limit),
            recorder_flips=int(recorder_other.sum()),
            routed=len(index),
        )
        same = ~(other | recorder_other)
        ordered = zip(*(by_expert(tensors, routing) for tensors in (outputs, layer.outputs, reference)), strict=True)
        verdicts = [
            # The weights of other experts are no measure of these.
            _judge_tensor(plain, a, b, c, same if i in (routing.index, *routing.weights) else None, relative)
            for i, (a, b, c) in enumerate(ordered)
        ]
    return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.used, verdict.bound.max))


def _judge_tensor(
    verdict: Verdict,
    value: Tensor,
    recorded: Tensor,
    reference: Tensor,
    rows: Tensor | None,
    relative: float,
) -> Verdict:
    where = torch.ones(value.shape, dtype=torch.bool)
    if rows is not None:
        where &= rows[:, None]
    if not value.is_floating_point():
        wrong = int(((value != recorded) & where).sum())
        return (
            verdict if not wrong else replace(verdict, ok=False, reason=f"{wrong} integers differ from the recorder's")
        )
    classes = [_class(tensor) for tensor in (value, recorded, reference)]
    # An infinity of the recorder's alone, an overflow for instance, may be here or not.
    misplaced = (classes[0] != classes[1]) & (classes[0] != classes[2]) & where
    finite = where & (classes[0] == 0) & (classes[1] == 0) & (classes[2] == 0)
    recorder, run = Errors.of(recorded, reference, finite), Errors.of(value, reference, finite)
    bound = recorder.bound(reference, finite, relative)
    reason = ""
    if misplaced.any():
        reason = _say_misplaced(value, recorded, reference, misplaced)
    elif run.mean > bound.mean:
        reason = f"mean error {run.mean:.2e}, at most {bound.mean:.2e} is allowed"
    elif run.max > bound.max:
        reason = f"largest error {run.max:.2e}, at most {bound.max:.2e} is allowed"
    return replace(verdict, ok=not reason, reason=reason, recorder=recorder, run=run, bound=bound)


def _class(tensor: Tensor) -> Tensor:
    """0 for finite numbers, 1 and -1 for infinities, 2 for NaN."""
    kinds = tensor.isposinf().to(torch.int8) - tensor.isneginf().to(torch.int8)
    return kinds.masked_fill(tensor.isnan(), 2)


def _say_misplaced(value: Tensor, recorded: Tensor, reference: Tensor, misplaced: Tensor) -> str:
    place = misplaced.nonzero()[0].tolist()
    at = tuple(place)
    return (
        f"{int(misplaced.sum())} NaN or infinities are not where they belong: at {place} it gave {value[at].item():g}, "
        f"the recorder {recorded[at].item():g}, float64 {reference[at].item():g}"
    )


def _explained_gap(
    logits: int | None, recorded: Sequence[Tensor], reference: Sequence[Tensor], relative: float
) -> float:
    """How far two scores may lie apart in float64 and still change places: as far as a score may err."""
    if logits is None:
        return 0.0
    exact = reference[logits]
    where = exact.isfinite() & recorded[logits].isfinite()
    bound = Errors.of(recorded[logits], exact, where).bound(exact, where, relative)
    # Scores are compared after a softmax or sigmoid in float32, where near ones become equal.
    scale = 1 + exact[where].abs().max().item() if where.any() else 1.0
    return bound.max + 8 * torch.finfo(torch.float32).eps * scale


def _shapes(tensors: Sequence[Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]
