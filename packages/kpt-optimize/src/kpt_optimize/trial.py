"""The trial loop: build a candidate, compare it, time it in turn with what it would replace, keep it only if it pays.

What a candidate is, a `Trial` says: a module, a whole model, a training step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Protocol, TypeVar

from torch import Tensor

from kpt_core.errors import InputError

from .measure import describe_gain, gain_of, has_numbers, noise_share, relative_error, rounding

Candidate = TypeVar("Candidate")
Compared = TypeVar("Compared", contravariant=True)

#: What a change may cost, relative to the largest value of the output, where the caller sets no budget.
DEFAULT_MAX_ERROR = {"conservative": 1e-4, "balanced": 2e-2, "aggressive": 1e-1}


class RejectedError(Exception):
    """Raised by a `Trial` for a candidate that is out of the question. The message is the reason."""


class UnsteadyError(InputError):
    """Two runs of one example differ."""


class Trial(Protocol[Compared]):
    """How candidates of one kind are compared and timed."""

    def error(self, candidate: Compared) -> float:
        """How far it is from the original on the example."""

    def budget(self, *, lossless: bool) -> float:
        """Return the error allowed."""

    def times(self, before: Compared, after: Compared) -> Sequence[Sequence[float]]:
        """Seconds of each, in turn."""

    def bytes(self, candidate: Compared) -> int:
        """Bytes of its parameters and buffers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial found.

    Attributes:
        kept: whether the candidate pays.
        reason: why, as a sentence.
        gain: seconds (or bytes) before / after; None if it was not measured.
        error: of its result; None if it was not compared.
        seconds: what building it and its first run took.
        failed: whether it raised.
        noise: standard error of `gain`.
    """

    kept: bool
    reason: str
    gain: float | None
    error: float | None
    seconds: float
    failed: bool = False
    noise: float = 0.0


def attempt(
    trial: Trial[Candidate], build: Callable[[], Candidate], current: Candidate, objective: str, *, lossless: bool
) -> tuple[Verdict, Candidate]:
    """Try one candidate.

    Args:
        trial: compares and times it.
        build: makes it.
        current: what it would replace.
        objective: `latency` or `memory`.
        lossless: whether its numerics class is that of the original.

    Returns:
        The verdict, and what is in force now: the candidate or `current`.
    """
    start = time.perf_counter()
    gain: float | None = None
    error: float | None = None
    took: float | None = None
    noise = 0.0

    def verdict(reason: str, *, kept: bool = False, failed: bool = False) -> Verdict:
        return Verdict(kept, reason, gain, error, time.perf_counter() - start if took is None else took, failed, noise)

    try:
        candidate = build()
        error = trial.error(candidate)
        took = time.perf_counter() - start
        budget = trial.budget(lossless=lossless)
        if not error <= budget:
            return verdict(f"error {error:.1e} exceeds the budget of {budget:.1e}"), current
        if objective == "memory":
            what, gain = "smaller", trial.bytes(current) / max(trial.bytes(candidate), 1)
        else:
            what, (gain, noise) = "faster", gain_of(*trial.times(current, candidate))
    except RejectedError as rejection:
        return verdict(str(rejection)), current
    except Exception as failure:
        return verdict(failed(failure), failed=True), current
    kept = gain > 1 + 2 * noise
    return verdict(describe_gain(gain, noise_share(gain, noise), what), kept=kept), candidate if kept else current


def setback(
    times: tuple[Sequence[float], Sequence[float]], sizes: tuple[int, int], objective: str, what: str
) -> str | None:
    """Say why all that was kept must go after all: the whole is no better than the original; None if it may stay.

    Args:
        times: seconds of the original and of the result, in turn.
        sizes: bytes of the two.
        objective: `latency` or `memory`.
        what: was kept, as the sentence calls it.
    """
    gain, noise = gain_of(*times)
    if objective == "latency" and gain < 1 - 2 * noise:
        return f"with the kept {what} together the model was {describe_gain(gain, noise_share(gain, noise))}"
    if objective == "memory" and sizes[1] >= sizes[0]:
        return f"with the kept {what} together the model was not smaller: {sizes[0]} bytes, then {sizes[1]}"
    return None


def failed(failure: Exception) -> str:
    """Return the reason of a candidate that raised, cut to a table's row: compilers' messages have pages."""
    return shorten(f"it failed: {type(failure).__name__}: {failure}", 300, placeholder="...")


def budget_of(
    expected: Any, level: str, max_error: float | None, *, lossless: bool, own: Mapping[str, float] | None = None
) -> float:
    """Return the error allowed.

    Args:
        expected: the original's result; a lossless change may differ by what rounding to its dtype explains.
        level: gives the default.
        max_error: the caller's budget, which stands as it is.
        lossless: whether the numerics class stays.
        own: budgets by level of what is tried, where the level's would suit no number format of its.
    """
    if max_error is not None:
        return max_error
    default = (own or {}).get(level, DEFAULT_MAX_ERROR[level])
    return max(default, rounding(expected)) if lossless else default


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of `model(...)` that trials run it on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: object, name: str) -> "Example":
        """The call with a tensor, a sequence of arguments or a mapping of keyword arguments.

        Raises:
            InputError: it is none of them; the message calls it `name`.
        """
        if isinstance(inputs, Tensor):
            return cls((inputs,), {})
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            return cls(tuple(inputs), {})
        raise InputError(
            f"{name} must be a tensor, a sequence of arguments or a mapping of keyword arguments for the model; "
            f"got {type(inputs).__name__}"
        )

    def __call__(self, function: Callable[..., Any]) -> Any:
        """The result of `function` for these arguments."""
        return function(*self.args, **self.kwargs)


def first_run(run: Callable[[], Any], inputs: str) -> Any:
    """Return the result of `run`; raise `InputError` that says on which inputs it failed."""
    try:
        return run()
    except InputError:
        raise
    except Exception as failure:
        raise InputError(
            f"the model does not run on the {inputs} inputs: {type(failure).__name__}: {failure}"
        ) from failure


def repeatable(run: Callable[[], Any], inputs: str) -> Any:
    """Return the result of `run`, which must come out twice: what changes by itself can't be compared.

    Args:
        run: the original on its inputs.
        inputs: what they are called, `example` or `sample`.

    Raises:
        InputError: it fails, the first time or the second, or gives no numbers to compare.
        UnsteadyError: the two results differ, whatever level and budget allow.
    """
    expected = first_run(run, inputs)
    if not has_numbers(expected):
        raise InputError(
            f"the model's output on the {inputs} inputs, of type {type(expected).__name__}, has no floating tensors to "
            "compare, so no error could be told: let it return tensors, or a tuple, dictionary or dataclass of them"
        )
    advice = "pass inputs without a cache, and switch dropout off"
    try:
        difference = relative_error(run(), expected)
    except Exception as failure:
        raise InputError(
            f"the model fails when it runs the {inputs} again: {type(failure).__name__}: {failure}: {advice}"
        ) from failure
    if difference > max(1e-4, rounding(expected)):
        raise UnsteadyError(
            f"the model gives another output when it runs the {inputs} again (difference {difference:.1e}): {advice}"
        )
    return expected
