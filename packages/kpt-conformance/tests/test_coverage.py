"""Coverage: what is documented and never exercised is named; a kernel that refuses all of a check fails the run."""

import inspect
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_conformance import coverage, generation, suite
from kpt_conformance.checks.catalog import CHECKS
from kpt_conformance.coverage import Coverage, nothing_of, planned
from kpt_conformance.outcomes import Outcomes
from kpt_optimize.cases import Arguments, Case, CaseTable, Domain, Sizes, case_tables

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]


@kpt_core.op("coverage.scaled")
def scaled(
    x: Tensor, bias: Tensor | None = None, *, kind: str = "plain", twice: bool = False, by: float = 1.0
) -> Tensor:
    """Multiplies."""
    y = x * by * (2 if twice else 1)
    return y if bias is None else y + bias


def _build(generator: torch.Generator, rows: int = 3, biased: bool = False, **options: Any) -> Arguments:
    x, bias = torch.ones(rows, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    return {"x": x, "bias": bias if biased else None, **options}


OPTIONS: dict[str, tuple[Any, ...]] = {
    "biased": (False, True),
    "kind": ("plain", "fancy"),
    "twice": (False, True),
    "by": (1.0, 2.0),
}


def table_of(cases: tuple[Case, ...] = (Case(name="small"),), **domain: Any) -> CaseTable:
    return CaseTable(op="coverage.scaled", build=_build, cases=cases, domain=Domain(**domain) if domain else None)


def plan(table: CaseTable) -> Coverage:
    return planned(table, CHECKS)


@pytest.mark.parametrize("op", sorted(op for op, table in case_tables().items() if table.domain is not None))
def test_nothing_documented_is_unexercised(op: str) -> None:
    assert plan(case_tables()[op]).unexercised() == []


def test_a_whole_domain_is_covered() -> None:
    found = plan(table_of(options=OPTIONS, sizes={"rows": Sizes()}))
    assert found.unexercised() == []
    assert found.to_json()["pairs"] == {"exercised": 24, "allowed": 24}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("biased", "parameter bias of the op is never given"),
        ("twice", "parameter twice of the op is never True"),
        ("by", "parameter by of the op is never another"),
        ("kind", "parameter kind of the op is never a value of the domain"),
    ],
)
def test_what_a_domain_forgets_the_signature_knows(option: str, sentence: str) -> None:
    left = {name: values for name, values in OPTIONS.items() if name != option}
    assert f"coverage.scaled: {sentence}" in plan(table_of(options=left)).unexercised()


def test_what_no_trial_had_is_named() -> None:
    table = table_of(options=OPTIONS, sizes={"rows": Sizes()})
    found = nothing_of(table, CHECKS)
    found.add("values", Case(name="small", sizes={"rows": 0}), torch.float32)
    told = found.unexercised()
    for sentence in (
        "dtype bfloat16 is never tried",
        "kind is never fancy",
        "biased=False and twice=True never come together",
        "size rows is never past 256",
        "check layouts is never run",
    ):
        assert f"coverage.scaled: {sentence}" in told
    assert not any("float32" in each or "rows is never 0" in each or "check values" in each for each in told)


def test_what_models_have_and_no_trial_had_is_named() -> None:
    sizes = {"rows": Sizes(usual=(65,)), "columns": Sizes(1, usual=(2_880,))}
    found = nothing_of(table_of(sizes=sizes, options=OPTIONS, families={"Gemma": {"by": 3.0}}), CHECKS)
    meeting = "rows=65 and columns=2880"
    for told in (f"{meeting} never come together", "Gemma is never tried"):
        assert f"coverage.scaled: {told}" in found.unexercised()
    found.usual[meeting] += 1
    found.families["Gemma"] += 1
    assert not any("65" in each or "Gemma" in each for each in found.unexercised())


def test_a_case_without_a_drawn_size_counts_by_its_default() -> None:
    found = nothing_of(table_of(options=OPTIONS, sizes={"rows": Sizes()}), CHECKS)
    found.add("values", Case(name="small"), torch.float32)
    assert found.sizes["rows"]["2 to 64"] == 1
    assert found.options["twice"] == Counter({"False": 1, "True": 0})


def test_the_first_value_of_an_option_is_what_build_does_without_it() -> None:
    for op, table in case_tables().items():
        defaults = {name: each.default for name, each in inspect.signature(table.build).parameters.items()}
        for name, values in (table.domain.options if table.domain else {}).items():
            assert defaults.get(name, values[0]) in (values[0], inspect.Parameter.empty), f"{op}: {name}"


def test_the_command_prints_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "case_tables", lambda: {"coverage.scaled": table_of(options=OPTIONS)})
    assert coverage.main(["--json", str(tmp_path / "coverage.json")]) == 0
    assert "option kind" in capsys.readouterr().out
    written = json.loads((tmp_path / "coverage.json").read_text())["coverage.scaled"]
    assert written["options"]["kind"]["fancy"] > 0
    few = {"twice": (False, True), "kind": ("plain", "fancy")}
    monkeypatch.setattr(coverage, "case_tables", lambda: {"coverage.scaled": table_of(options=few)})
    assert coverage.main([]) == 1
    assert "parameter by of the op is never another" in capsys.readouterr().out


def test_what_was_refused_alone_proves_nothing() -> None:
    run = Outcomes()
    run.add("acme: one", 20, "values", "float32", {"passed": 1, "refused": 5})
    run.add("acme: one", 20, "values", "float16", {"refused": 5, "skipped": 1})
    run.add("acme: one", 20, "padding", "float16", {"skipped": 3})
    run.add("acme: one", 20, "nans", "float16", {"refused": 1, "failed": 4})
    run.add("acme: cut short", 3, "values", "float16", {"refused": 2})
    run.judge()
    assert [sentence.partition(": that")[0] for sentence in run.sentences] == [
        "acme: one refused every trial of values in float16"
    ]


BACKEND = """
from dataclasses import replace

import honest
from kpt_conformance import generation, suite
from kpt_conformance.checks import results
from kpt_conformance.loopback import Loopback
from kpt_optimize.cases import Domain
from kpt_core.registry import add_backend
from kpt_optimize.cases import case_tables


def refuse(call):
    return {refusal}


backend = Loopback("acme")
backend.offer("moe.grouped_mm", *honest.grouped_mm_of(), unsupported=refuse)
add_backend(backend)
# One check on few cases, so that the run is quick.
table = case_tables()["moe.grouped_mm"]
domain = Domain(options={{"stored": ("KN", "NK")}})
table = replace(table, cases=table.cases[:3], wrong=table.wrong[:1], domain=domain)
suite.case_tables = lambda: {{table.op: table}}
generation.CHECKS = (results.result_type,)
generation.DECLARATIONS = ()
"""


ACME = ("--kpt-backend=acme", "-p", "no:cacheprovider")
NO_TWO_BYTES = "'no two bytes are taken here' if call.x.dtype.itemsize == 2 else None"


@pytest.fixture
def refusing(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write a backend whose kernel refuses what an expression says."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{pytester.path}")
    for module, name in ((suite, "case_tables"), (generation, "CHECKS"), (generation, "DECLARATIONS")):
        monkeypatch.setattr(module, name, getattr(module, name))  # puts back what the backend's conftest changes here
    return lambda refusal: pytester.makeconftest(BACKEND.format(refusal=refusal)) and None


def test_a_kernel_that_refuses_a_dtype_that_it_claims_fails(refusing: Callable[[str], None], run_here: Run) -> None:
    refusing(NO_TWO_BYTES)
    result = run_here(*ACME)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "failed" not in result.parseoutcomes()
    for dtype in ("bfloat16", "float16"):
        result.stdout.fnmatch_lines([f"*refused every trial of result_type in {dtype}: that proves nothing*"])


@pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not there")
def test_it_fails_too_where_processes_share_the_tests(
    refusing: Callable[[str], None], pytester: pytest.Pytester
) -> None:
    refusing(NO_TWO_BYTES)
    result = pytester.runpytest_subprocess(*ACME, "-n2", timeout=300)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "failed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*refused every trial of result_type in float16: that proves nothing*"])
    few = pytester.runpytest_subprocess(*ACME, "-n2", "-k", "small", timeout=300)
    assert few.ret == pytest.ExitCode.OK, few.stdout.str()


def test_a_kernel_that_refuses_most_cases_is_said_aloud() -> None:
    outcomes = Outcomes()
    outcomes.add("acme: one", 5, "values", "float32", {"passed": 1, "refused": 4})
    outcomes.add("acme: two", 5, "values", "float32", {"passed": 3, "refused": 2})
    outcomes.judge()
    assert outcomes.sentences == []
    assert [warning.partition(" trials")[0] for warning in outcomes.warnings] == ["acme: one refused 4 of 5"]


def test_a_kernel_that_refuses_some_cases_passes(refusing: Callable[[str], None], run_here: Run) -> None:
    # Of float64, which few use, there is a case of many rows alone.
    refusing("'too many rows for this' if len(call.x) > 5 and call.x.dtype.itemsize < 8 else None")
    result = run_here(*ACME)
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()


def test_a_kernel_may_take_calls_with_gradients_alone(
    refusing: Callable[[str], None], pytester: pytest.Pytester, run_here: Run
) -> None:
    refusing("'no gradient is wanted' if len(call.x) > 5 and not call.needs else None")
    conftest = pytester.path / "conftest.py"
    conftest.write_text(
        conftest.read_text().replace("results.result_type,", "results.result_type, results.fake_result,")
    )
    result = run_here(*ACME, "-rs")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    result.stdout.fnmatch_lines(["*refused: without gradients: *", "*acme *: no gradient is wanted"])


def test_a_part_of_a_run_is_not_judged(refusing: Callable[[str], None], run_here: Run) -> None:
    refusing(NO_TWO_BYTES)
    assert run_here(*ACME, "-k", "small").ret == pytest.ExitCode.OK


def test_a_run_writes_what_passed(refusing: Callable[[str], None], pytester: pytest.Pytester, run_here: Run) -> None:
    refusing(NO_TWO_BYTES)
    run_here(*ACME, "--kpt-coverage=found.json")
    (found,) = json.loads((pytester.path / "found.json").read_text()).values()
    assert found["dtypes"]["float32"] == 5
    assert found["dtypes"]["float16"] == 0
    assert "moe.grouped_mm: dtype float16 is never tried" in found["unexercised"]
    assert found["options"]["stored"] == {"KN": 5, "NK": 1}


def test_an_op_without_a_domain_is_judged_by_its_signature() -> None:
    told = plan(replace(table_of(), domain=None)).unexercised()
    assert "coverage.scaled: parameter twice of the op is never True" in told
