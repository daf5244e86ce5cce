"""The plugin: what it collects, how it refuses, expected failures and reports, in a pytest of its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import kpt_moe.ops  # noqa: F401  pytester takes back what runs import, and operators can be registered once
from kpt_conformance import suite
from kpt_conformance.report import read

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

#: A backend with one right kernel, and one that is wrong in bfloat16.
BACKEND = """
import honest
from kpt_conformance.loopback import Loopback

right = honest.grouped_mm_of()
wrong = honest.grouped_mm_of(lambda x, w, o: honest.product(x, w, o) * (0.5 if x.dtype.itemsize == 2 else 1))

backend = Loopback("acme")
KERNEL = backend.offer("moe.grouped_mm", *{kernel}).forward
"""
CONFTEST = """
from acme import backend
from kpt_core.registry import add_backend

add_backend(backend)
"""
TEST = """
from kpt_conformance import Suite


class TestAcme(Suite):
    backend = "acme"
"""
QUICK = ("-k", "result_type and small", "-p", "no:cacheprovider")
FAILING = "values-moe.grouped_mm-*-small-bfloat16"


@pytest.fixture
def acme(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """The folder of a backend's tests, whose kernel is right; `write_kernel` makes it wrong."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{pytester.path}")
    write_kernel(pytester, "right")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_conformance=TEST)
    return pytester


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave few cases of two ops: what the plugin does with its tests does not depend on their number."""
    tables = suite.case_tables()
    kept = {
        op: replace(tables[op], cases=tables[op].cases[:2], domain=None) for op in ("moe.grouped_mm", "moe.experts")
    }
    monkeypatch.setattr(suite, "case_tables", lambda: kept)


def write_kernel(pytester: pytest.Pytester, kernel: str) -> None:
    pytester.makepyfile(acme=BACKEND.format(kernel=kernel))


def run_alone(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in a process of its own, with every op and case."""
    return pytester.runpytest_subprocess(*arguments, timeout=300)


def test_two_lines_are_a_test_file(acme: pytest.Pytester) -> None:
    run_alone(acme, *QUICK).assert_outcomes(passed=8, deselected=pytest.approx(0, abs=10**6))  # two ops in four dtypes


@pytest.mark.usefixtures("few")
def test_a_wrong_kernel_fails(acme: pytest.Pytester, run_here: Run) -> None:
    write_kernel(acme, "wrong")
    result = run_here("-k", "values and grouped_mm and small and float and not wgrad and not experts")
    result.assert_outcomes(passed=2, failed=2, deselected=pytest.approx(0, abs=10**6))
    result.stdout.fnmatch_lines(["*result: mean error * exceeds *"])


@pytest.mark.usefixtures("few")
def test_the_option_runs_the_suite_without_a_file(acme: pytest.Pytester, run_here: Run) -> None:
    (acme.path / "test_conformance.py").unlink()
    result = run_here("--kpt-backend=acme", *QUICK)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*8 passed*"])


@pytest.mark.usefixtures("few")
def test_another_backend_is_left_out(acme: pytest.Pytester, run_here: Run) -> None:
    result = run_here("--kpt-backend=reference", "test_conformance.py", "-rs")
    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines(["*--kpt-backend=reference*"])


@pytest.mark.usefixtures("few")
def test_kernels_that_no_name_tells_apart_are_refused(acme: pytest.Pytester, run_here: Run) -> None:
    acme.makeconftest(CONFTEST + "\nbackend._kernels *= 2\n")
    run_here(*QUICK).stdout.fnmatch_lines(["*two tests are called values-moe.grouped_mm-*"])


@pytest.mark.usefixtures("few")
def test_an_unknown_backend_is_refused(acme: pytest.Pytester, run_here: Run) -> None:
    result = run_here("--kpt-backend=acne")
    assert result.ret == pytest.ExitCode.USAGE_ERROR or result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*unknown backend 'acne': did you mean 'acme'?*"])


@pytest.mark.usefixtures("few")
def test_a_backend_that_cannot_run_is_said(acme: pytest.Pytester, run_here: Run) -> None:
    acme.makeconftest(CONFTEST + "\nbackend.broken = 'no such chip is in this machine'\n")
    skipped = run_here("-rs")
    skipped.assert_outcomes(skipped=6)
    skipped.stdout.fnmatch_lines(["*no such chip is in this machine*"])
    asked = run_here("--kpt-backend=acme")
    assert asked.ret != 0
    asked.stdout.fnmatch_lines(["*backend acme can't run here: no such chip is in this machine*"])


@pytest.mark.usefixtures("few")
def test_an_expected_failure_needs_to_fail(acme: pytest.Pytester, run_here: Run) -> None:
    (acme.path / "xfails.txt").write_text(f"{FAILING}  # bfloat16 is halved\n")
    chosen = ("-k", "values and grouped_mm and small and bfloat16 and not wgrad and not experts", "-rx")
    write_kernel(acme, "wrong")
    run_here(*chosen).assert_outcomes(xfailed=1, deselected=pytest.approx(0, abs=10**6))
    write_kernel(acme, "right")
    result = run_here(*chosen)
    result.assert_outcomes(failed=1, deselected=pytest.approx(0, abs=10**6))
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "values-moe.grouped_mm-*-smal-bfloat16  # misspelt",
            "*'values-moe.grouped_mm-*-smal-bfloat16' is the id of no*",
        ),
        (FAILING, "*xfails.txt:1: '*' has no reason*"),
    ],
)
def test_a_line_that_is_stale_or_bare_is_refused(acme: pytest.Pytester, run_here: Run, line: str, message: str) -> None:
    (acme.path / "xfails.txt").write_text(line + "\n")
    result = run_here(*QUICK)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


#: One op with a table of one case, so that the whole suite is quick.
ONE_CASE = """
from dataclasses import replace
from kpt_conformance import generation, suite

tables = suite.case_tables()
table = replace(tables["{op}"], cases=tables["{op}"].cases[:1], domain=None)
suite.case_tables = lambda: {{table.op: table}}
generation.layer_cases = lambda: {{}}
"""


@pytest.mark.parametrize("processes", [(), ("-n2",)])
def test_a_report_tells_how_each_check_ended(pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    pytester.makeconftest(ONE_CASE.format(op="moe.grouped_mm_wgrad"))
    chosen = (*processes, "-k", "values or layouts or padding", "-W", "ignore")
    result = run_alone(pytester, "--kpt-backend=reference", "--kpt-report=run.json", *chosen)
    assert result.ret == 0, result.stdout.str()
    report = read(pytester.path / "run.json")
    assert (report.backend, report.level, report.device, report.commit) == ("reference", "ran", "cpu", None)
    assert report.selection == "-k values or layouts or padding"
    assert report.versions["torch"]
    (columns,) = report.kernels.values()
    assert list(report.kernels) == ["moe.grouped_mm_wgrad reference"]
    assert columns["float32"] == {"passed": 2, "refused": 0, "skipped": 1, "failed": 0, "absent": ["padding"]}
    assert sum(each["passed"] for each in columns.values()) == result.parseoutcomes()["passed"]


def test_a_report_counts_failures_and_needs_a_folder(acme: pytest.Pytester, run_here: Run) -> None:
    write_kernel(acme, "wrong")
    chosen = ("-k", "values and small and grouped_mm and not wgrad and not experts")
    assert run_here("--kpt-report=run.json", *chosen).ret == 1
    report = read(acme.path / "run.json")
    wrong = [columns for kernel, columns in report.kernels.items() if "grouped_mm" in kernel]
    assert any(counts["failed"] and counts["failing"] == ["values"] for each in wrong for counts in each.values())
    run_here("--kpt-report=nowhere/run.json").stderr.fnmatch_lines(["*--kpt-report: there is no folder *nowhere*"])


def test_other_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    run_alone(pytester).assert_outcomes(passed=1)


@pytest.mark.usefixtures("few")
def test_a_device_must_exist_and_the_backend_run_on_its_own(acme: pytest.Pytester, run_here: Run) -> None:
    unknown = run_here("--kpt-backend=acme", "--kpt-device=gpu")
    assert unknown.ret != 0
    unknown.stdout.fnmatch_lines(["*'gpu' is no device*"])
    acme.makeconftest(CONFTEST + "\nbackend.broken = 'no such chip is in this machine'\n")
    broken = run_here("--kpt-backend=acme", "--kpt-device=cpu")
    assert broken.ret != 0
    broken.stdout.fnmatch_lines(["*backend acme can't run here: no such chip is in this machine*"])


def collected(run: Run, *arguments: str) -> dict[str, int]:
    """How many trials of each check are collected for the kernel of `moe.grouped_mm`."""
    lines = run("--collect-only", "-q", "-k", "grouped_mm and not wgrad", *arguments).outlines
    checks = [line.partition("test_kernel[")[2].partition("-")[0] for line in lines if "test_kernel[" in line]
    return {check: checks.count(check) for check in checks}


def test_a_quick_run_has_every_check_on_few_trials(acme: pytest.Pytester, run_here: Run) -> None:
    quick, whole = collected(run_here, "--kpt-quick"), collected(run_here)
    fewer = collected(run_here, "--kpt-quick", "--kpt-quick-trials=2")
    assert fewer.keys() == quick.keys() == whole.keys()
    assert max(count for check, count in fewer.items() if check != "values") == 2
    assert quick["values"] < whole["values"]
    assert max(count for check, count in quick.items() if check != "values") == 6
    assert quick == collected(partial(run_alone, acme), "--kpt-quick"), "every process must have the same trials"


def test_a_quick_run_may_have_all_values_and_more_of_what_changed(acme: pytest.Pytester, run_here: Run) -> None:
    quick, whole = collected(run_here, "--kpt-quick"), collected(run_here)
    more = collected(run_here, "--kpt-quick", "--kpt-quick-values", "--kpt-quick-changed=loopback:offered")
    assert more["values"] == whole["values"] > quick["values"]
    others = [check for check in quick if check != "values"]
    assert all(quick[check] <= more[check] <= 12 for check in others)
    assert any(more[check] > 6 for check in others)


def test_a_quick_run_finds_a_wrong_kernel(acme: pytest.Pytester, run_here: Run) -> None:
    write_kernel(acme, "wrong")
    result = run_here("--kpt-quick", "-k", "values and grouped_mm and not wgrad and not experts")
    assert result.parseoutcomes()["failed"] > 0
    result.stdout.fnmatch_lines(["*--kpt-quick: at most 6 trials of each check and kernel*"])


def test_right_kernels_are_measured_and_wrong_ones_are_not(
    acme: pytest.Pytester, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pytest_benchmark")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # beside others, nothing would be measured
    chosen = ("-k", "small and grouped_mm and not wgrad and not experts", "--benchmark-max-time=0.01")
    write_kernel(acme, "wrong")
    result = run_here("--kpt-backend=acme", "--kpt-bench", "--benchmark-json=speed.json", *chosen)
    assert result.parseoutcomes() == {"passed": 2, "failed": 4, "deselected": result.parseoutcomes()["deselected"]}
    result.stdout.fnmatch_lines(["*no figure, because `values` is red on this case: *"])
    entries = json.loads((acme.path / "speed.json").read_text())["benchmarks"]
    assert {entry["group"] for entry in entries} == {"moe.grouped_mm small"}
    assert [entry["params"]["direction"] for entry in entries] == ["forward", "forward+backward"]
    assert {entry["params"]["dtype"] for entry in entries} == {"float32"}
    assert all(entry["extra_info"]["forward_flops"] > 0 for entry in entries)


def test_what_is_measured_must_be_named(acme: pytest.Pytester, run_here: Run) -> None:
    run_here("--kpt-bench").stderr.fnmatch_lines(["*--kpt-bench needs --kpt-backend=NAME*"])


#: Instead of the right kernel's forward, or beside it.
IMPORTING = """
from dataclasses import replace

backend._kernels = tuple(replace(kernel, forward="broken_module:forward") for kernel in backend._kernels)
"""


def test_a_kernel_that_cannot_be_imported_is_said_once(acme: pytest.Pytester) -> None:
    acme.makepyfile(broken_module="import foo_that_is_not_there")
    acme.makeconftest(ONE_CASE.format(op="moe.grouped_mm") + CONFTEST + IMPORTING)
    result = run_alone(acme, "--kpt-backend=acme", "-W", "ignore")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = [line for line in result.outlines if line.startswith("FAILED: ")]
    assert len(told) == 1
    assert told[0].endswith(
        "was never tried, because its module can't be imported: "
        "ModuleNotFoundError: No module named 'foo_that_is_not_there'"
    )


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("question", ["unavailable", "kernels"])
def test_a_backend_that_raises_where_it_is_asked_is_said_in_a_line(
    acme: pytest.Pytester, run_here: Run, question: str
) -> None:
    acme.makeconftest(
        f"{CONFTEST}\ndef _raise():\n    raise OSError('libacme.so is gone')\nbackend.{question} = _raise\n"
    )
    result = run_here("--kpt-backend=acme")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*backend acme: {question}() raised OSError: libacme.so is gone*"])
    assert "plugin.py" not in result.stdout.str()
