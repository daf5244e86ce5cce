"""The suite finds every planted fault, and nothing in kernels that are right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import honest
import kpt_core
from kpt_conformance.checks import declarations
from kpt_conformance.extent import extent_of
from kpt_conformance.loopback import Loopback
from kpt_conformance.suite import CHECKS, trials
from kpt_conformance.trial import Subject, Trial
from kpt_core import Call, Refusal
from kpt_core.cases import CaseTable
from kpt_core.registry import case_tables
from mutants import MUTANTS, Mutant
from scaled_mm import SCALED_MM

CHECK = {check.__name__: check for check in CHECKS}


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback("planted", capabilities={"bf16"}) as backend:
        yield backend
    torch.use_deterministic_algorithms(False)  # as one of the faults leaves it


def table_of(op: str) -> CaseTable:
    return SCALED_MM if op == SCALED_MM.op else case_tables()[op]


def subject_of(loopback: Loopback, kernel: kpt_core.Kernel) -> Subject:
    return Subject(kpt_core.get_op(kernel.op), kernel.forward, loopback.name, torch.device("cpu"), kernel)


def fault_in(trial: Trial, check: str) -> str | None:
    """What a check says of a trial; None if it passes or is skipped."""
    try:
        CHECK[check](trial)
    except pytest.skip.Exception:
        return None
    except Exception as error:
        return f"{trial.case.name}: {type(error).__name__}: {error}"
    return None


def faults_in(subject: Subject, table: CaseTable, check: str) -> Iterator[str]:
    for trial in trials(subject, table, extent_of(CHECK[check])):
        fault = fault_in(trial, check)
        if fault is not None:
            yield fault


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_found(loopback: Loopback, mutant: Mutant) -> None:
    kernel = loopback.offer(mutant.op, *mutant.make(), **mutant.offer)
    subject, table = subject_of(loopback, kernel), table_of(mutant.op)
    if mutant.found_by == "declaration":
        with pytest.raises((AssertionError, kpt_core.KptError)):
            declarations.declaration(subject, table)
    else:
        assert next(faults_in(subject, table, mutant.found_by), None), f"{mutant.found_by} does not find the fault"


def test_there_are_faults_for_every_check() -> None:
    known = {mutant.found_by for mutant in MUTANTS}
    assert len(MUTANTS) >= 25
    # The rest are faults of ops, not of kernels: see test_checks.
    compiled = {"custom_ops", "compiled", "compiled_dynamic", "exported"}
    assert set(CHECK) - known == compiled | {"derivatives", "meta_result", "vmapped", "autocast"}


def _picky(call: Call) -> Refusal | str | None:
    """A kernel may refuse by sizes and by strides."""
    if call.x.shape[0] % 2:
        return Refusal("needs an even number of rows, not {rows}", rows=call.x.shape[0])
    return None if call.weight.is_contiguous() and call.weight.stride(0) < 2**31 // 8 else "needs a contiguous weight"


@dataclass(frozen=True)
class Honest:
    """A right kernel, and how it is offered."""

    op: str
    make: Callable[[], tuple[honest.Function, ...]]
    offer: dict[str, Any] = field(default_factory=dict)


HONEST = {
    "grouped_mm": Honest("moe.grouped_mm", honest.grouped_mm_of),
    "picky": Honest("moe.grouped_mm", honest.grouped_mm_of, {"unsupported": _picky, "dtypes": {"bfloat16"}}),
    "forward only": Honest("moe.grouped_mm", lambda: honest.grouped_mm_of()[:1]),
    "experts": Honest("moe.experts", lambda: (honest.Experts(),), {"differentiable": True}),
    "scaled_mm": Honest("sample.scaled_mm", lambda: (honest.scaled_mm, honest.scaled_mm_backward)),
}


@pytest.mark.parametrize("check", [*CHECK, "declaration"])
@pytest.mark.parametrize("name", HONEST)
def test_nothing_is_found_in_a_right_kernel(loopback: Loopback, name: str, check: str) -> None:
    right = HONEST[name]
    kernel = loopback.offer(right.op, *right.make(), **right.offer)
    subject, table = subject_of(loopback, kernel), table_of(right.op)
    if check == "declaration":
        declarations.declaration(subject, table)
    else:
        assert "\n".join(faults_in(subject, table, check)) == ""
