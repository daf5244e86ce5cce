"""What the check of costs tells, and what it fails."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import honest
import kpt_core
from kpt_conformance.checks import cost
from kpt_conformance.loopback import Loopback
from kpt_conformance.subject import Subject
from kpt_conformance.trial import Trial
from kpt_optimize.cases import case_tables
from mutants import attention

CPU = torch.device("cpu")


def trial_of(loopback: Loopback, before: Callable[[Any], Any], *linear_in: str) -> Trial:
    forward, backward = honest.grouped_mm_of()

    def grouped_mm(call: Any) -> Any:
        before(call)
        return forward(call)

    kernel = loopback.offer("moe.grouped_mm", grouped_mm, backward)
    table = replace(case_tables()["moe.grouped_mm"], linear_in=linear_in)
    subject = Subject(kpt_core.get_op("moe.grouped_mm"), kernel.forward, loopback.name, CPU, kernel)
    return Trial(subject, table, table.cases[0], torch.float32)


@pytest.fixture
def loopback():
    with Loopback("costly", capabilities={"bf16"}) as backend:
        yield backend


def squares(call: Any) -> None:
    torch.empty(len(call.x), len(call.x), 4)


def test_linear_memory_passes_where_it_is_said(loopback: Loopback) -> None:
    cost.cost(trial_of(loopback, lambda call: None, "rows"))


def test_quadratic_memory_fails_where_linear_is_said(loopback: Loopback) -> None:
    with pytest.raises(AssertionError, match="memory must be linear in rows"):
        cost.cost(trial_of(loopback, squares, "rows"))


def test_attention_of_all_scores_at_once_fails(loopback: Loopback) -> None:
    kernel = loopback.offer("attention.dense", *attention.right())
    table = case_tables()["attention.dense"]
    subject = Subject(kpt_core.get_op("attention.dense"), kernel.forward, loopback.name, CPU, kernel)
    with pytest.raises(AssertionError, match="memory must be linear in queries and keys"):
        cost.cost(Trial(subject, table, table.cases[0], torch.float32))


def test_what_is_only_large_is_told_and_does_not_fail(loopback: Loopback) -> None:
    trial = trial_of(loopback, lambda call: torch.empty(2**26, dtype=torch.uint8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error")
        cost.cost(trial)
    assert {each.category for each in told} == {cost.CostWarning}
    assert "has 6" in str(told[0].message)


def test_the_most_memory_is_of_what_lives_at_once() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8)

    assert cost.peak_bytes(CPU, run) == 2**20
