"""Drawn cases: the same in every process, every allowed pair, every size past every tile, and what reviews missed."""

import itertools
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from kpt_conformance.drawing import completions, covered, drawn_cases
from kpt_conformance.extent import Extent
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain, Sizes, case_tables

OPS = sorted(op for op, table in case_tables().items() if table.domain is not None)
DTYPES = (torch.float32, torch.bfloat16)


def table_of(**domain: Any) -> CaseTable:
    return CaseTable(op="toy.any", build=lambda generator, **sizes: sizes, cases=(), domain=Domain(**domain))


@cache
def made(op: str) -> list[Arguments]:
    table = case_tables()[op]
    return [table.arguments(case) for case in drawn_cases(table)]


def test_the_ops_of_the_first_feature_have_domains() -> None:
    assert {"moe.experts", "moe.grouped_mm", "moe.grouped_mm_wgrad", "moe.scaled_grouped_mm", "moe.top_k_gating"} <= {
        *OPS
    }


def test_a_table_without_a_domain_draws_nothing() -> None:
    assert drawn_cases(CaseTable(op="toy.any", build=lambda generator: {}, cases=())) == ()


def test_every_pair_that_is_allowed_is_drawn() -> None:
    options = {"a": (1, 2, 3), "b": ("x", "y", "z", "w"), "c": (False, True), "d": (None, 1)}
    table = table_of(options=options, allowed=lambda v: not (v["a"] == 2 and v["b"] == "y") and (v["c"] or not v["d"]))
    rows = [case.sizes for case in drawn_cases(table) if case.once is None]
    for one, other in itertools.combinations(options, 2):
        for pair in itertools.product(options[one], options[other]):
            wanted = pair not in [(2, "y"), (False, 1)]
            assert wanted == any((row[one], row[other]) == pair for row in rows), (one, other, pair)
    assert len(rows) < 3 * 4 * 2 * 2 / 2  # pairs need no product of all values


def test_every_three_that_are_allowed_are_drawn_and_tried_once() -> None:
    options = {"a": (1, 2, 3), "b": ("x", "y", "z", "w"), "c": (False, True), "d": (None, 1)}
    table = table_of(options=options, allowed=lambda v: not (v["a"] == 2 and v["b"] == "y" and v["c"]))
    rows = [case.sizes for case in drawn_cases(table)]
    for names in itertools.combinations(options, 3):
        for values in itertools.product(*(options[name] for name in names)):
            wanted = names != ("a", "b", "c") or values != (2, "y", True)
            assert wanted == any(tuple(row[name] for name in names) == values for row in rows), (names, values)
    once = [case for case in drawn_cases(table) if case.once is not None]
    tried = [Extent(drawn="all", dtypes=True).dtypes_of(case, DTYPES, (torch.float64,)) for case in once]
    assert {len(dtypes) for dtypes in tried} == {1}
    assert set().union(*tried) == {*DTYPES, torch.float64}
    assert not any(Extent(drawn="first", dtypes=True).dtypes_of(case, DTYPES) for case in once)


def test_a_size_that_may_be_large_beyond_all_others_is_once() -> None:
    table = table_of(sizes={"rows": Sizes(many=40_000), "columns": Sizes(1)}, options={"a": (1, 2)})
    tall = [case for case in drawn_cases(table) if case.sizes["rows"] == 40_000]
    assert [case.once for case in tall] == [0, 1]  # in two dtypes: rows of half the bytes reach other borders
    assert {case.sizes["columns"] for case in tall} == {3}


def test_usual_sizes_meet_each_other_and_the_options_that_are_sized() -> None:
    table = table_of(
        sizes={"rows": Sizes(usual=(1, 641)), "columns": Sizes(1, usual=(2_880,)), "experts": Sizes(1)},
        options={"scales": ("row", "block"), "biased": (False, True)},
        sized=("scales",),
        allowed=lambda values: values.get("rows", 1) * values.get("columns", 1) <= 1_000_000,
    )
    rows = [case.sizes for case in drawn_cases(table) if case.once is not None]

    def meet(**wanted: Any) -> bool:
        return any(wanted.items() <= row.items() and row["experts"] <= 6 for row in rows)

    assert meet(rows=1, columns=2_880)
    assert not meet(rows=641, columns=2_880)  # which is not allowed
    for scales in ("row", "block"):
        assert meet(rows=641, scales=scales)
        assert meet(columns=2_880, scales=scales)


def test_families_are_cases_of_their_own_values() -> None:
    table = table_of(options={"softcap": (0.0, 2.0)}, families={"Gemma": {"softcap": 50.0}, "T5": {"scale": 1.0}})
    made = {case.name: (case.sizes, case.once) for case in drawn_cases(table) if case.name.startswith("family")}
    assert made == {"family: Gemma": ({"softcap": 50.0}, 1), "family: T5": ({"scale": 1.0}, 2)}


def test_what_is_seldom_meets_the_rest_in_cases_that_are_tried_once() -> None:
    options = {"a": (1, 2, 3), "b": ("x", "y", "z"), "shape": ("BH", "1H", "B1")}
    cases = drawn_cases(table_of(options=options, seldom=("shape",)))
    assert not any("shape" in case.sizes for case in cases if case.once is None)
    for name in ("a", "b"):
        for pair in itertools.product(options[name], options["shape"][1:]):
            assert any((case.sizes[name], case.sizes.get("shape")) == pair for case in cases), pair


def test_one_and_true_are_two_values() -> None:
    table = table_of(options={"a": (1, True), "b": (0, 1)})
    assert len({(type(case.sizes["a"]), case.sizes["b"]) for case in drawn_cases(table)}) == 4


def test_each_size_is_large_in_turn_and_zero_where_it_may_be() -> None:
    table = table_of(sizes={"rows": Sizes(), "columns": Sizes(1), "experts": Sizes(1, 64)}, options={"a": (1, 2)})
    drawn = {name: {case.sizes[name] for case in drawn_cases(table)} for name in ("rows", "columns", "experts")}
    for name in ("rows", "columns"):
        assert {65, 129, 257, 513} <= drawn[name], name
    assert max(drawn["experts"]) == 64
    assert {name for name, sizes in drawn.items() if 0 in sizes} == {"rows"}


def test_sizes_keep_to_what_is_allowed() -> None:
    table = table_of(
        sizes={"tokens": Sizes(), "top_k": Sizes(1), "experts": Sizes(1)},
        options={"a": (1, 2)},
        allowed=lambda values: values.get("top_k", 1) <= values.get("experts", 1),
    )
    assert all(case.sizes["top_k"] <= case.sizes["experts"] for case in drawn_cases(table))


@pytest.mark.parametrize("op", OPS)
def test_pairs_of_ops_are_in_cases_that_have_something_to_do(op: str) -> None:
    table = case_tables()[op]
    assert table.domain is not None
    sized = [case for case in drawn_cases(table) if not any(case.sizes.get(name) == 0 for name in table.domain.sizes)]
    assert set(completions(table.domain)) == set().union(*(covered(table.domain, case.sizes) for case in sized))


@pytest.mark.parametrize("op", OPS)
def test_cases_can_be_made_and_are_small(op: str) -> None:
    for arguments in made(op):
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.numel() for tensor in tensors) < 4_200_000


def test_other_processes_draw_the_same() -> None:
    code = (
        "from kpt_conformance.drawing import drawn_cases; from kpt_optimize.cases import case_tables; "
        "print([(c.name, dict(c.sizes)) for t in case_tables().values() for c in drawn_cases(t)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = str([(c.name, dict(c.sizes)) for t in case_tables().values() for c in drawn_cases(t)])
    assert done.stdout == f"{here}\n"
    assert "drawn 3" in here


def test_no_two_logits_of_a_token_are_alike_in_any_dtype() -> None:
    table = case_tables()["moe.top_k_gating"]
    for case in drawn_cases(table):
        for dtype in table.dtypes:
            logits = table.arguments(case, dtype=dtype)["logits"].double().sort(-1).values
            gaps = logits.diff(dim=-1)
            assert (gaps[~gaps.isnan() & logits[:, 1:].isfinite()] > 0).all(), (case.name, dtype)


def _most_rows(arguments: Arguments) -> int:
    """Of one expert."""
    if "offsets" in arguments:
        ends = arguments["offsets"]
        return int((ends - torch.cat((ends.new_zeros(1), ends[:-1]))).max())
    ids = arguments["top_k_index"].flatten()
    return int(ids[(ids >= 0) & (ids < 2**31)].bincount(minlength=1).max())


def _away(arguments: Arguments) -> bool:
    ids = arguments["top_k_index"]
    return bool(((ids < 0) | (ids >= len(arguments["gate_up_proj"]))).any())


def _of_swiglu(arguments: Arguments) -> tuple[bool, bool, bool]:
    """Tell whether alpha, beta and limit are others than usual."""
    return (
        arguments.get("alpha", 1.0) != 1.0, arguments.get("beta", 0.0) != 0.0, arguments.get("limit") is not None
    )  # fmt: skip


#: What kernels got wrong that passed when every case was a named one.
MISSED = {
    **{
        f"{op}: more than 128 rows of an expert": (op, lambda a: _most_rows(a) > 128)
        for op in OPS
        if op.startswith("moe.") and "gating" not in op
    },
    **{f"{op}: more than 32 groups": (op, lambda a: len(a["offsets"]) > 32) for op in OPS if "grouped_mm" in op},
    "logits past 2": ("moe.top_k_gating", lambda a: a["logits"][a["logits"].isfinite()].abs().gt(2).any()),
    "logits of about 30": ("moe.top_k_gating", lambda a: a["logits"][a["logits"].isfinite()].abs().gt(25).any()),
    "logits of -inf": ("moe.top_k_gating", lambda a: a["logits"].isinf().any()),
    "bias of fractions": ("moe.top_k_gating", lambda a: (a.get("correction_bias", torch.zeros(1)) % 1).any()),
    "bias of hundreds": ("moe.top_k_gating", lambda a: (a.get("correction_bias", torch.zeros(1)).abs() > 100).any()),
    "all experts": ("moe.top_k_gating", lambda a: 1 < a["top_k"] == a["logits"].shape[1]),
    "tokens": ("moe.experts", lambda a: len(a["x"]) > 64),
    "one bias": ("moe.experts", lambda a: (a["gate_up_proj_bias"] is None) != (a["down_proj_bias"] is None)),
    "alpha alone": ("moe.experts", lambda a: _of_swiglu(a) == (True, False, False)),
    "beta alone": ("moe.experts", lambda a: _of_swiglu(a) == (False, True, False)),
    "limit alone": ("moe.experts", lambda a: _of_swiglu(a) == (False, False, True)),
    "e5m2": ("moe.experts", lambda a: a["gate_up_proj"].dtype is torch.float8_e5m2),
    "one scale": ("moe.experts", lambda a: ("gate_up_scale" in a) != ("down_scale" in a)),
    "bias and absent pairs": ("moe.experts", lambda a: a["gate_up_proj_bias"] is not None and _away(a)),
    "several blocks": (
        "moe.experts",
        lambda a: "down_scale" in a and a["down_scale"].dim() == 3 and a["down_scale"].shape[2] > 2,
    ),
}


@pytest.mark.parametrize("missed", MISSED)
def test_what_named_cases_missed_is_drawn(missed: str) -> None:
    op, has = MISSED[missed]
    assert any(has(arguments) for arguments in made(op))


def test_drawn_cases_are_tried_where_a_check_asks() -> None:
    drawn, named = Case(name="drawn 0", drawn=True), Case(name="small")
    for wanted, count, interpreted in (("all", 2, 1), ("first", 1, 0), ("none", 0, 0)):
        extent = Extent(drawn=wanted, dtypes=True)  # type: ignore[arg-type]
        assert len(extent.dtypes_of(drawn, DTYPES)) == count
        assert len(extent.dtypes_of(drawn, DTYPES, slow=True)) == interpreted
        assert len(extent.dtypes_of(named, DTYPES, slow=True)) == 2
