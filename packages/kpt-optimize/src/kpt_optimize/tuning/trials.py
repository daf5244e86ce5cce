"""Trying the kernels of an op on one case: only what is right is timed, and only what is surely faster wins."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kpt_core.contract import TORCH, Call, Op, load
from kpt_core.dispatch.autograd import wanted
from kpt_core.dispatch.candidates import Candidate, first_of, size_key
from kpt_core.dispatch.run import run
from kpt_core.dispatch.settings import effective, scoped
from kpt_core.errors import InputError, RegistrationError
from kpt_core.policy import Choice, Key
from kpt_core.selection import REFERENCE, Refused
from kpt_optimize.cases import Arguments, Case, CaseTable
from kpt_optimize.measure import gain_of, interleaved_times, relative_error, rounding

from .files import TuningEntry, is_config, is_key, packages_of, today

Config = dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What came of one case of an op.

    Attributes:
        key: which calls the result is for; empty if no kernel serves the device and dtype.
        entry: the winner, None if there was nothing to choose from.
        left_out: kernels and configurations that were not timed, and why.
    """

    op: str
    case: str
    dtype: str
    key: Key
    entry: TuningEntry | None
    left_out: tuple[Refused, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Option:
    """A kernel with one of its configurations."""

    backend: str
    kernel: str
    config: Config
    run: Callable[[], object]

    def __str__(self) -> str:
        return self.kernel if self.config is None else f"{self.kernel} with {self.config}"


def try_case(
    op: Op[..., Any],
    table: CaseTable,
    case: Case,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    training: bool = False,
) -> TuningResult:
    """Time every kernel and configuration that takes a case and computes it rightly.

    All are timed in turn first; the fastest one then meets what runs without tuning once more, and replaces it only if
    it is faster by more than twice the noise of that second measurement.

    Args:
        op: the op.
        table: its cases; for training, it names the arguments with a gradient.
        case: one of them.
        device: where to run.
        dtype: of the run.
        seconds: about how long to measure.
        training: time forward and backward, for calls that need a gradient.

    Raises:
        InputError: a choice of kernels (`use`, `KPT_USE`) is in force.
        RegistrationError: the op's `size_key` does not give a tuple of ints and strings.
    """
    found, name = op.candidates(device, dtype), str(dtype).removeprefix("torch.")
    result = partial(TuningResult, op=op.name, case=case.name, dtype=name)
    if found.explicit is not None:
        raise InputError(f"{found.explicit} was asked for (use or KPT_USE): tuning compares kernels, take that back")
    if not found.accepted:
        return result(key=(), entry=None, left_out=found.refusals)
    arguments = table.arguments(case, dtype=dtype, device=device)
    gradients = table.gradients if training else ()
    for tensor in tree_leaves([arguments.get(name) for name in gradients]):
        if tensor is not None:
            tensor.requires_grad_()
    with torch.set_grad_enabled(training):
        call = op.bind(**arguments)
        call = call._replace(needs=wanted(op, call) if training else ())
        key = size_key(op, call)
        if not is_key(key):
            raise RegistrationError(f"op {op.name}: its size_key gave {key!r}; expected a tuple of ints and strings")
        left_out = list(found.refusals)
        in_force = found.tuned.entries.get(key) if found.tuned is not None else None
        options = list(_options(op, found.accepted, call, left_out, gradients, in_force))
        right = list(_right(op, table, arguments, call, options, left_out)) if options else []
        entry = None
        if any(option.kernel != REFERENCE for option in right):
            winner, taken, gain, noise = _fastest(right, device, seconds)
            distribution, version = packages_of(op.name)[winner.kernel]
            entry = TuningEntry(
                op=op.name,
                dtype=name,
                key=tuple(key),
                kernel=winner.kernel,
                config=winner.config,
                seconds=taken,
                default=right[0].kernel,
                present=tuple(candidate.identity for candidate in found.accepted),
                gain=gain,
                noise=noise,
                case=case.name,
                distribution=distribution,
                version=version,
                torch=str(torch.__version__),
                date=today(),
            )
    return result(key=tuple(key), entry=entry, left_out=tuple(left_out))


def _options(
    op: Op[..., Any],
    accepted: tuple[Candidate, ...],
    call: Call,
    left_out: list[Refused],
    gradients: tuple[str, ...],
    in_force: Choice | None,
) -> Iterator[_Option]:
    """Yield what may run, the choice without tuning first; nothing if that is the reference."""
    taking = []
    for candidate in accepted:
        reason = candidate.refusal(call)
        if reason is None:
            taking.append(candidate)
        else:
            left_out.append(Refused(candidate.backend, candidate.kernel.forward, reason, of_call=True))
    for candidate in taking:
        configs: list[Config] = [None]
        try:
            configs += _configs(candidate, call)
        except Exception as error:
            reason = f"its configurations {candidate.kernel.configs}: {_said(error)}"
            left_out.append(Refused(candidate.backend, candidate.kernel.forward, reason))
        if in_force is not None and in_force.kernel == candidate.identity and in_force.config not in configs:
            configs.append(in_force.config)
        for config in configs:
            if config is None or is_config(config):
                run_once = _call(op, candidate, config, call, gradients)
                yield _Option(candidate.backend, candidate.identity, config, run_once)
            else:
                reason = f"its configuration {config!r:.60} would not come back from JSON as it is"
                left_out.append(Refused(candidate.backend, candidate.kernel.forward, reason))
    # Where there are kernels in plain PyTorch, the reference would only take time, and memory on real models' sizes.
    if taking and all(candidate.backend != TORCH for candidate in taking):
        yield _Option(REFERENCE, REFERENCE, None, _call(op, None, None, call, gradients))


def _configs(candidate: Candidate, call: Call) -> list[dict[str, Any]]:
    """Return the configurations that a kernel names for a call, as dictionaries."""
    if candidate.kernel.configs is None:
        return []
    named = load(candidate.kernel.configs)
    return [
        asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
        for config in (named(call) if callable(named) else named)
    ]


def _call(
    op: Op[..., Any], candidate: Candidate | None, config: Config, call: Call, gradients: tuple[str, ...]
) -> Callable[[], object]:
    """Return one run of a kernel: it gives the result, or the result and the gradients."""
    wanted = [each for each in tree_leaves([getattr(call, name) for name in gradients]) if each is not None]
    call = call._replace(config=config)

    def run_once() -> object:
        result = run(op, candidate, call)
        if not wanted:
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return result, torch.autograd.grad(outputs, wanted, [_slopes(out) for out in outputs], allow_unused=True)

    return run_once


def _slopes(output: torch.Tensor) -> torch.Tensor:
    """Return gradients that differ from element to element: the ones of a sum would hide exchanged rows."""
    steps = torch.arange(output.numel(), device=output.device).remainder(7) - 3
    return steps.to(output.dtype).view(output.shape)


def _right(
    op: Op[..., Any],
    table: CaseTable,
    arguments: Arguments,
    call: Call,
    options: list[_Option],
    left_out: list[Refused],
) -> Iterator[_Option]:
    """Yield the options whose result is that of plain PyTorch, up to rounding."""
    plain = next(option for option in options if option.backend in (TORCH, REFERENCE))
    with scoped(replace(effective(), choices=(("*", plain.backend),))):
        expected = plain.run()
    # Sums are carried in float32 or better, and their rounding errors grow like a random walk.
    dtype = first_of(op, call).dtype
    carried = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) if dtype.is_floating_point else 0.0
    length = table.reduction(arguments) if table.reduction is not None else 1
    allowed = rounding(expected) + 4 * carried * length**0.5
    for option in options:
        try:
            error = _error(option.run(), expected)
            reason = f"its result is off by {error:.1e} of the greatest element; rounding explains {allowed:.1e}"
        except Exception as failure:
            error, reason = math.inf, f"raised {_said(failure)}"
        if error <= allowed:
            yield option
        else:
            left_out.append(Refused(option.backend, str(option), reason, of_call=True))


def _error(result: object, expected: object) -> float:
    """Return the relative error of floating tensors; infinity if a tensor of integers differs at all."""
    error = relative_error(result, expected)
    if math.isfinite(error):
        for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            if isinstance(b, torch.Tensor) and not b.is_floating_point() and not torch.equal(a, b):
                return math.inf
    return error


def _fastest(options: list[_Option], device: torch.device, seconds: float) -> tuple[_Option, float, float, float]:
    """Return the winner, the median of its seconds, and its gain over the first option with the gain's noise."""
    default = options[0]
    times = interleaved_times([option.run for option in options], device, seconds / 2)
    best = min(range(len(options)), key=lambda index: statistics.median(times[index]))
    if best == 0:
        return default, statistics.median(times[0]), 1.0, 0.0
    # Anew: the fastest of many in one measurement owes some of that to luck.
    before, after = interleaved_times([default.run, options[best].run], device, seconds / 2)
    gain, noise = gain_of(before, after)
    if gain - 2 * noise > 1:
        return options[best], statistics.median(after), gain, noise
    return default, statistics.median(before), 1.0, noise


def _said(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
