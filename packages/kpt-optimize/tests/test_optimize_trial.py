"""The trial loop, with candidates that are names: errors, times and sizes are looked up."""

from dataclasses import dataclass

import pytest
import torch

from kpt_core import InputError
from kpt_optimize import (
    Example,
    RejectedError,
    UnsteadyError,
    Verdict,
    attempt,
    budget_of,
    repeatable,
    setback,
)


@dataclass
class Names:
    """The original is `old`: no error, 4 seconds, 100 bytes."""

    errors: float | Exception = 0.0
    seconds: tuple[float, ...] = (1.0,)
    size: int = 50

    def error(self, candidate: str) -> float:
        if isinstance(self.errors, Exception):
            raise self.errors
        return self.errors

    def budget(self, *, lossless: bool) -> float:
        return 0.1 if lossless else 0.5

    def times(self, before: str, after: str) -> list[list[float]]:
        if not self.seconds:
            raise RuntimeError("no clock " * 100)
        return [[4.0] * len(self.seconds), list(self.seconds)]

    def bytes(self, candidate: str) -> int:
        return 100 if candidate == "old" else self.size


def tried(trial: Names, objective: str = "latency", *, lossless: bool = True) -> Verdict:
    verdict, winner = attempt(trial, lambda: "new", "old", objective, lossless=lossless)
    assert winner == ("new" if verdict.kept else "old")
    return verdict


@pytest.mark.parametrize(
    ("trial", "objective", "kept", "reason"),
    [
        (Names(), "latency", True, "4.00x faster"),
        (Names(seconds=(5.0,)), "latency", False, "1.25x slower"),
        (Names(seconds=(4.0,)), "latency", False, "as fast"),
        (Names(seconds=(1.0, 4.0, 3.9)), "latency", False, "as fast (±5.4%)"),
        (Names(seconds=(1.0, 4.0, 2.0, 8.0)), "latency", False, "too noisy for a figure (±93%)"),
        (Names(seconds=(5.0,)), "memory", True, "2.00x smaller"),
        (Names(size=100), "memory", False, "as large"),
        (Names(0.2), "latency", False, "error 2.0e-01 exceeds the budget of 1.0e-01"),
        (Names(float("nan")), "latency", False, "error nan exceeds the budget of 1.0e-01"),
        (Names(RejectedError("of no use")), "latency", False, "of no use"),
        (Names(ValueError("midway")), "latency", False, "it failed: ValueError: midway"),
    ],
)
def test_a_candidate_is_kept_only_if_it_pays(trial: Names, objective: str, kept: bool, reason: str) -> None:
    verdict = tried(trial, objective)
    assert (verdict.kept, verdict.reason) == (kept, reason)
    assert verdict.failed is isinstance(trial.errors, ValueError)


def test_a_lossy_candidate_has_another_budget() -> None:
    assert not tried(Names(0.2)).kept
    assert tried(Names(0.2), lossless=False).kept
    expected = torch.ones(1, dtype=torch.bfloat16)
    assert budget_of(expected, "balanced", None, lossless=True) == 2**-5
    assert budget_of(expected, "balanced", None, lossless=False) == 2e-2
    assert budget_of(expected, "balanced", 1e-9, lossless=True) == 1e-9


def test_a_failure_while_it_is_built_or_timed_is_a_reason_of_one_row() -> None:
    def build() -> str:
        raise torch.OutOfMemoryError("too large")

    verdict, winner = attempt(Names(), build, "old", "latency", lossless=True)
    assert (winner, verdict.reason) == ("old", "it failed: OutOfMemoryError: too large")
    timed = tried(Names(seconds=()))
    assert timed.failed
    assert timed.error == 0
    assert timed.reason.startswith("it failed: RuntimeError: no clock no clock")
    assert len(timed.reason) <= 300


@pytest.mark.parametrize(
    ("after", "sizes", "objective", "reason"),
    [
        ([2.0], (9, 9), "latency", "with the kept steps together the model was 2.00x slower"),
        ([1.0], (9, 9), "latency", None),
        ([2.0], (9, 8), "memory", None),
        ([0.1], (9, 9), "memory", "with the kept steps together the model was not smaller: 9 bytes, then 9"),
    ],
)
def test_the_whole_must_be_no_worse(
    after: list[float], sizes: tuple[int, int], objective: str, reason: str | None
) -> None:
    assert setback(([1.0], after), sizes, objective, "steps") == reason


def test_what_changes_by_itself_is_refused() -> None:
    results = iter([torch.ones(1), torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(1)])
    assert repeatable(lambda: next(results), "sample") == 1
    with pytest.raises(UnsteadyError, match="gives another output when it runs the sample again"):
        repeatable(lambda: next(results), "sample")
    with pytest.raises(InputError, match="fails when it runs the sample again: StopIteration"):
        repeatable(lambda: next(results), "sample")
    with pytest.raises(InputError, match="does not run on the sample inputs: StopIteration"):
        repeatable(lambda: next(results), "sample")


def test_an_example_is_a_tensor_a_sequence_or_a_mapping() -> None:
    x = torch.ones(2)
    for inputs in (x, (x,), [x], {"input": x}):
        assert Example.of(inputs, "inputs")(torch.nn.Identity()) is x
    with pytest.raises(InputError, match=r"inputs must be a tensor, .* got str"):
        Example.of("x", "inputs")
