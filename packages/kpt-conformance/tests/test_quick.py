"""Which trials a quick run has: a table's first case, those that tell something of a check, then any."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kpt_core
from kpt_conformance.extent import over
from kpt_conformance.quick import shortened
from kpt_conformance.subject import Subject
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Case, CaseTable, Domain

TABLE = CaseTable(
    op="toy.any",
    build=lambda generator, **sizes: sizes,
    cases=tuple(Case(name=f"case {place}", sizes={"dropout": 0.5 * (place % 5 == 4)}) for place in range(40)),
    domain=Domain(options={"dropout": (0.0, 0.5)}),
)


@over(telling=("dropout",))
def of_randomness(trial: Trial) -> None:
    """A check that cases with dropout tell something of."""


@over()
def of_all(trial: Trial) -> None:
    """Another one."""


class Taking(Subject):
    """A subject that takes everything."""

    def __str__(self) -> str:
        return "toy.any-acme.kernels:forward"

    def refusal(self, arguments: Any) -> None:
        return None


def chosen(check: Callable[[Trial], None], **how: Any) -> list[Case]:
    subject = Taking(kpt_core.get_op("moe.grouped_mm"), "acme.kernels:forward", "acme", torch.device("cpu"))
    trials = [Trial(subject, TABLE, case, torch.float32) for case in TABLE.cases]
    suite = SimpleNamespace(is_kpt_suite=True)
    items: list[Any] = [
        _Item(name=f"test_kernel[{trial}]", cls=suite, parent=None, params={"check": check, "trial": trial})
        for trial in trials
    ]
    kept, rest = shortened(items, 6, **how)
    assert len(kept) + len(rest) == len(items)
    return [item.callspec.params["trial"].case for item in kept]


class _Item:
    def __init__(self, name: str, cls: Any, parent: Any, params: dict[str, Any]) -> None:
        self.name, self.cls, self.parent = name, cls, parent
        self.callspec = SimpleNamespace(params=params)


@pytest.mark.parametrize("check", [of_randomness, of_all])
def test_the_first_case_is_among_the_trials_of_every_check(check: Callable[[Trial], None]) -> None:
    assert TABLE.cases[0] in chosen(check)
    assert len(chosen(check)) == 6
    assert len(chosen(check, changed=["acme.kernels"])) == 12


def test_cases_that_tell_are_all_but_two() -> None:
    telling = [case for case in chosen(of_randomness) if case.sizes["dropout"]]
    assert len(telling) >= 4 > len([case for case in chosen(of_all) if case.sizes["dropout"]])
    assert len(telling) < 6
