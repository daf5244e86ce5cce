"""Judge a run beside the recorder's: both against float64, with what rounding explains; docs/numerics.md derives it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: A run may err this many times as much as the recorder, on average and at the worst place.
MEAN_FACTOR, MAX_FACTOR = 1.1, 2.0
#: The mean absolute error of a rounding, or of a sum of many, in units of the largest that one can be.
MEAN_OF_ROUNDING = 1 / 3


def own_lengths(module: nn.Module, outputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Return over how many terms the sums go that a module computes itself, not by its children; one of 0 if none.

    Matrices, stacked ones of experts too, sum over the size that they contract, norms over their width, attention over
    `head_dim` for its scores and over the keys for its values.
    """
    lengths, widths = [], []
    for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
        if parameter.dim() == 1:
            widths.append(len(parameter))
        elif isinstance(module, nn.modules.conv._ConvNd):
            lengths.append(parameter[0].numel())
        elif parameter.dim() in (2, 3):
            transposed = parameter.dim() == 3 and getattr(module, "is_transposed", False)
            lengths.append(parameter.shape[1 if transposed else -1])
    if not lengths and widths:
        lengths.append(max(widths))  # a norm; beside a matrix it is a bias
    head_dim = getattr(module, "head_dim", None)
    keys = next((output.shape[-2] for output in outputs if output.dim() >= 3), None)
    if isinstance(head_dim, int) and keys is not None:
        lengths += [head_dim, keys]
    return tuple(lengths) or (0,)


def rounding(lengths: Sequence[int], dtype: torch.dtype) -> float:
    """Return the relative error of sums that long, each rounded once to a dtype and taken in float32 at least."""
    unit = torch.finfo(dtype).eps / 2
    sums = min(unit, torch.finfo(torch.float32).eps / 2)
    return math.sqrt(len(lengths)) * unit + math.sqrt(sum(lengths)) * sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one module in a run, and in a trace float64 beside it. Tensors are on the CPU."""

    key: str  # the module's path, with `#2` and so on for further calls of it; of a gradient, what it belongs to
    type: str  # name of its class, or `gradient`
    inputs: tuple[Tensor, ...] = ()  # the tensors among its arguments, in order
    outputs: tuple[Tensor, ...]  # the tensors that it gave, before any steering
    kernels: tuple[str, ...] = ()  # what served KPT's ops in it, as `op: kernel`
    lengths: tuple[int, ...] = ()  # over how many terms its own sums go, see `own_lengths`
    rounding: float = 0.0  # the relative error that rounding explains at its end in a whole run
    reference: tuple[Tensor, ...] = ()  # what it gave in float64, where everything before it ran in float64 too
    #: what it gives in float64 on the recorder's inputs, its children's results being the recorder's too
    alone: tuple[Tensor, ...] = ()
    #: what the code around it hands to it in float64, where all results of modules are the recorder's
    handed: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute errors of a tensor against float64, over the places where both are finite."""

    mean: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, value: Tensor, exact: Tensor, where: Tensor) -> "Errors":
        """Compare the elements that a mask names."""
        difference = (value.double() - exact.double()).abs()[where]
        return cls(difference.mean().item(), difference.max().item()) if len(difference) else cls()

    def bound(self, exact: Tensor, where: Tensor, relative: float) -> "Errors":
        """Return what another run may err, if these are the recorder's errors."""
        values = exact.double()[where]
        if not len(values):
            return Errors()
        # Three standard errors of the mean of so many errors: of four numbers, one run's may be right by luck.
        luck = 3 / math.sqrt(len(values))
        return Errors(
            (MEAN_FACTOR + luck) * self.mean + MEAN_OF_ROUNDING * relative * values.square().mean().sqrt().item(),
            (MAX_FACTOR + luck) * self.max + relative * values.abs().max().item(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one call of a module."""

    key: str  # path of the module, with `#2` and so on for further calls; of a gradient, what it belongs to
    type: str  # the module's class, or `gradient`
    reason: str = ""  # what is wrong, `""` if this run is no worse than the recorder
    inputs: tuple[str, ...] = ()  # dtypes and shapes of the tensors that the module took
    recorder: Errors = Errors()  # the recorder's errors against float64
    run: Errors = Errors()  # this run's
    bound: Errors = Errors()  # what this run may err
    recorded_kernels: tuple[str, ...] = ()  # what served KPT's ops for the recorder
    kernels: tuple[str, ...] = ()  # what serves them in this run
    routed: int = 0  # how many tokens were routed
    flips: int = 0  # how many of them otherwise than by the recorder
    recorder_flips: int = 0  # how many of them by the recorder otherwise than in float64

    @property
    def name(self) -> str:
        """Return how people call it."""
        return f"gradient of {self.key}" if self.type == "gradient" else self.key or "(model)"

    @property
    def used(self) -> float:
        """Return how much of the bound is used; over 1 is too much."""
        pairs = ((self.run.mean, self.bound.mean), (self.run.max, self.bound.max))
        return max(error / bound if bound else (math.inf if error else 0.0) for error, bound in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"ok": not self.reason, "used": self.used}


def judge(recorded: Call, call: Call | None, exact: Sequence[Tensor], relative: float) -> Verdict:
    """Judge one call, None if this run made no such call, beside the recorder's and what float64 gives.

    `relative` is the relative error that rounding explains.
    """
    inputs = tuple(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in recorded.inputs)
    plain = Verdict(key=recorded.key, type=recorded.type, inputs=inputs, recorded_kernels=recorded.kernels)
    if call is None:
        return replace(plain, reason="the recorder ran it and this run did not")
    plain = replace(plain, kernels=call.kernels)
    sides = [call.outputs, recorded.outputs, exact]
    shapes = [[list(tensor.shape) for tensor in side] for side in sides]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        return replace(plain, reason=f"it gave shapes {shapes[0]}; recorded {shapes[1]}, in float64 {shapes[2]}")
    routing, same, reason = find_routing(recorded.outputs), None, ""
    if routing is not None:
        now, was, right = (side[routing.experts] for side in sides)
        flipped, recorder_flipped = differing_rows(now, was), differing_rows(was, right)
        if routing.logits is not None:
            reason = say_flips(now, was, right, exact[routing.logits], recorded.outputs[routing.logits], relative)
        counts = int(flipped.sum()), int(recorder_flipped.sum())
        plain = replace(plain, flips=counts[0], recorder_flips=counts[1], routed=len(now))
        # The weights of other experts are no measure of these, and equal scores may come in any order.
        same = ~(flipped | recorder_flipped)[:, None]
        at = routing.experts
        sides = [
            tuple(leaf.gather(-1, side[at].argsort(-1)) if i in routing.chosen else leaf for i, leaf in enumerate(side))
            for side in sides
        ]
    verdicts = [
        _judge_tensor(plain, tensors, same if routing is not None and i in routing.chosen else None, relative)
        for i, tensors in enumerate(zip(*sides, strict=True))
    ]
    worst = max(verdicts, key=lambda verdict: (bool(verdict.reason), verdict.used, verdict.bound.max))
    return replace(worst, reason=worst.reason or reason)


def _judge_tensor(verdict: Verdict, sides: tuple[Tensor, ...], rows: Tensor | None, relative: float) -> Verdict:
    value, recorded, exact = sides
    where = torch.ones(value.shape, dtype=torch.bool) if rows is None else rows.expand(value.shape)
    if not value.is_floating_point():
        wrong = int(((value != recorded) & where).sum())
        return replace(verdict, reason=f"{wrong} integers differ from the recorder's") if wrong else verdict
    kinds = [_kind(tensor) for tensor in sides]
    # An infinity of the recorder's alone, an overflow for instance, may be here or not.
    misplaced = ((kinds[0] != kinds[1]) & (kinds[0] != kinds[2]) & where).nonzero().tolist()
    finite = where & (kinds[0] == 0) & (kinds[1] == 0) & (kinds[2] == 0)
    recorder, run = Errors.of(recorded, exact, finite), Errors.of(value, exact, finite)
    bound = recorder.bound(exact, finite, relative)
    reason = ""
    if misplaced:
        gave, was, right = (tensor[tuple(misplaced[0])].item() for tensor in sides)
        reason = (
            f"{len(misplaced)} NaN or infinities are not where they belong: at {misplaced[0]} it gave {gave:g}, the "
            f"recorder {was:g}, float64 {right:g}"
        )
    elif run.mean > bound.mean:
        reason = f"mean error {run.mean:.2e}, at most {bound.mean:.2e} is allowed"
    elif run.max > bound.max:
        reason = f"largest error {run.max:.2e}, at most {bound.max:.2e} is allowed"
    return replace(verdict, reason=reason, recorder=recorder, run=run, bound=bound)


def _kind(tensor: Tensor) -> Tensor:
    """Return 0 for finite numbers, 1 and -1 for infinities, 2 for NaN."""
    kinds = tensor.isposinf().to(torch.int8) - tensor.isneginf().to(torch.int8)
    return kinds.masked_fill(tensor.isnan(), 2)


class Routing(NamedTuple):
    """The places of a routing among the tensors that a module takes or gives."""

    experts: int  #: position of the chosen experts, an integer `[tokens, top_k]`
    chosen: tuple[int, ...]  #: that, and those of floating tensors of the same shape, their weights
    logits: int | None  #: that of the scores that the choice was made by, `[tokens, num_experts]`, if they are there


def find_routing(leaves: Sequence[Tensor]) -> Routing | None:
    """Return where a choice of experts and its weights are among tensors, if anywhere."""
    floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() and leaf.dim() == 2]
    for position, leaf in enumerate(leaves):
        if leaf.dim() == 2 and leaf.dtype in (torch.int64, torch.int32):
            weights = [i for i in floating if leaves[i].shape == leaf.shape]
            wider = [i for i in floating if len(leaves[i]) == len(leaf) and leaves[i].shape[1] > leaf.shape[1]]
            if weights:
                return Routing(position, (position, *weights), wider[0] if len(wider) == 1 else None)
    return None


def differing_rows(experts: Tensor, other: Tensor) -> Tensor:
    """Return which tokens go to other experts, whatever their order: bool `[tokens]`."""
    return (experts.sort(-1).values != other.sort(-1).values).any(-1)


def say_flips(now: Tensor, was: Tensor, right: Tensor, scores: Tensor, recorded: Tensor, relative: float) -> str:
    """Return what is wrong with tokens that go to other experts than they did for the recorder, `""` if nothing is.

    The choices `[tokens, top_k]` are this run's, the recorder's and float64's, the scores `[tokens, num_experts]` are
    float64's and the recorder's, of which rounding explains a `relative` error.
    """
    if differing_rows(scores.topk(now.shape[1], dim=-1).indices, right).any():
        return ""  # biases and groups decide beside the scores, whose order tells nothing
    finite = scores.isfinite() & recorded.isfinite()
    limit = Errors.of(recorded, scores, finite).bound(scores, finite, relative).max
    # Scores are compared after a softmax or sigmoid in float32, where near ones become equal.
    limit += 8 * torch.finfo(torch.float32).eps * (1 + scores[finite].abs().amax().item() if finite.any() else 1)
    chosen = (x.long().clamp(0, scores.shape[1] - 1) for x in (now, was))  # -1 is no expert
    gained, lost = (torch.zeros_like(scores).scatter(1, x, 1).bool() for x in chosen)
    gained, lost = gained & ~lost, lost & ~gained
    gaps = scores.where(lost, -math.inf).amax(1) - scores.where(gained, math.inf).amin(1)
    wrong = (gaps > limit).nonzero().flatten().tolist()
    if not wrong:
        return ""
    return (
        f"{len(wrong)} tokens flipped, not by rounding: at token {wrong[0]} float64's scores of the exchanged experts "
        f"lie {gaps[wrong[0]].item():.1e} apart, and rounding explains {limit:.1e}"
    )
