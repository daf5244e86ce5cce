"""The support table: what it says of reports, and that it may say nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from kpt_conformance.report import Report, read
from kpt_conformance.support import Claimed, document, findings, main
from kpt_core import Kernel

KERNEL = "moe.grouped_mm kpt_moe.torch_kernels.grouped_mm:loop"
PASSED = {"passed": 9, "refused": 1, "skipped": 2, "failed": 0}
RUN = Report(
    date="2026-11-20T10:00:00Z",
    commit="0123456789ab",
    backend="torch",
    level="ran",
    chip="Acme One (avx2)",
    device="cpu",
    selection="all",
    versions={"torch": "2.13.0"},
    kernels={KERNEL: {"float32": PASSED, "bfloat16": PASSED}},
)
CLAIM = Claimed(
    "moe.grouped_mm",
    "torch",
    "kpt_moe.torch_kernels.grouped_mm:loop",
    (),
    Kernel("moe.grouped_mm", forward="kpt_moe.torch_kernels.grouped_mm:loop"),
)


def table(folder: Path, *reports: Report) -> str:
    for number, report in enumerate(reports):
        (folder / f"{number}.json").write_text(report.dumps())
    return document([CLAIM], findings(folder), folder)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RUN.dumps())
    assert read(tmp_path / "run.json") == RUN


@pytest.mark.parametrize(
    ("reports", "cell"),
    [
        ([RUN], "[ran 2026-11-20 0123456][1] (avx2)"),
        ([RUN, replace(RUN, date="2026-11-21T10:00:00Z", commit=None)], "[ran 2026-11-21 no commit][1] (avx2)"),
        ([RUN, replace(RUN, date="2026-11-21T10:00:00Z", selection="-k values")], "[ran 2026-11-20 0123456][1] (avx2)"),
        ([replace(RUN, selection="-k values")], "[ran in part 2026-11-20 0123456][1] (avx2)"),
        (
            [replace(RUN, kernels={KERNEL: {"float32": {**PASSED, "failed": 1}}})],
            "[failed 2026-11-20 0123456][1] (avx2)",
        ),
        (
            [replace(RUN, kernels={KERNEL: {"float32": {**PASSED, "passed": 0}}})],
            "[claimed 2026-11-20 0123456][1] (avx2)",
        ),
        ([replace(RUN, level="interpreted")], "[interpreted 2026-11-20 0123456][1]"),
        (
            [replace(RUN, level="compiled", chip="", device="cuda", kernels={KERNEL: {"sm90": PASSED}})],
            "[compiled 2026-11-20 0123456][1]",
        ),
    ],
)
def test_a_cell_says_what_the_newest_report_says(tmp_path: Path, reports: list[Report], cell: str) -> None:
    assert f" | {cell} |" in table(tmp_path, *reports)


def test_what_is_gone_is_told_no_more_and_what_no_report_names_is_claimed(tmp_path: Path) -> None:
    other = replace(CLAIM, function="kpt_moe.torch_kernels.grouped_mm:other")
    table(tmp_path, RUN)
    text = document([other, replace(CLAIM, device_types=("cpu",), function="new:one")], findings(tmp_path), tmp_path)
    assert "[ran" not in text
    assert "| moe.grouped_mm | `new:one` | claimed |" in text


def test_a_kernel_claims_nothing_on_the_chips_of_another_vendor(tmp_path: Path) -> None:
    compiled = replace(
        RUN, level="compiled", chip="", device="cuda", kernels={KERNEL: {"sm90": PASSED, "gfx942": PASSED}}
    )
    table(tmp_path, compiled)
    other = replace(CLAIM, backend="amd", function="new:one", device_types=("cuda",), chips=("gfx90a", "gfx942"))
    text = document([replace(CLAIM, device_types=("cuda",)), other], findings(tmp_path), tmp_path)
    assert "| sm90 | gfx942 |" in text
    assert "| moe.grouped_mm | `new:one` | - | claimed |" in text
    nowhere = document([replace(other, chips=("gfx90a",))], findings(tmp_path), tmp_path)
    assert "`new:one` | - |" not in nowhere


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", RUN.dumps()[:-9], RUN.dumps().replace("kpt-report-1", "kpt-report-0")]
)
def test_what_is_no_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert main(["write", "--reports", str(tmp_path), "--table", str(tmp_path / "support.md")]) == 2
    assert "bad.json is no report of a run" in capsys.readouterr().err
    assert not (tmp_path / "support.md").exists()


def test_a_table_that_says_something_else_is_found(tmp_path: Path) -> None:
    reports, written = tmp_path / "evidence", tmp_path / "support.md"
    reports.mkdir()
    options = ["--reports", str(reports), "--table", str(written), "--levels", str(tmp_path / "levels.json")]
    table(reports, RUN)
    assert main(["check", *options]) == 1
    assert main(["write", *options]) == 0
    assert main(["check", *options]) == 0
    written.write_text(written.read_text().replace("claimed", "ran", 1))
    assert main(["check", *options]) == 1
