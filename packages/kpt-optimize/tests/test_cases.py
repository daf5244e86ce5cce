"""Tables of cases as data: what a domain refuses, and what stays as it was made."""

import pytest
import torch

from kpt_core import RegistrationError
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain, Sizes


def test_sizes_that_hold_nothing_are_refused() -> None:
    with pytest.raises(RegistrationError, match="got least=3 and most=2"):
        Sizes(3, 2)


def test_many_are_more_than_most() -> None:
    with pytest.raises(RegistrationError, match="got most=513 and many=100"):
        Sizes(many=100)


def test_a_dtype_is_usual_or_rare() -> None:
    with pytest.raises(RegistrationError, match="float32 is among dtypes and rare"):
        CaseTable(op="toy.any", build=lambda generator: {}, cases=(), rare=(torch.float32,))


def test_a_name_is_a_size_or_an_option() -> None:
    with pytest.raises(RegistrationError, match="'rows' is among the sizes and the options"):
        Domain(sizes={"rows": Sizes()}, options={"rows": (1, 2)})


def test_an_option_of_one_value_is_none() -> None:
    with pytest.raises(RegistrationError, match="'score' must have two values at least"):
        Domain(options={"score": ("softmax",)})


def test_what_comes_first_must_be_allowed() -> None:
    with pytest.raises(RegistrationError, match="first values of all options"):
        Domain(options={"score": ("softmax", "sigmoid")}, allowed=lambda values: values["score"] == "sigmoid")


def test_what_is_kept_is_float64_in_every_run() -> None:
    def build(generator: torch.Generator) -> Arguments:
        return {name: torch.ones(2, dtype=torch.float64) for name in ("x", "scale")}

    table = CaseTable(op="toy.scaled", build=build, cases=(Case(name="small"),), kept=frozenset({"scale"}))
    made = table.arguments(table.cases[0], dtype=torch.bfloat16)
    assert made["x"].dtype is torch.bfloat16
    assert made["scale"].dtype is torch.float64
