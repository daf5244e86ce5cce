"""`kpt bench moe`: what it reports, and when it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kpt_core
import kpt_optimize
from kpt_cli.bench import moe
from kpt_cli.bench.contest import Refused
from kpt_cli.bench.moe import Line, Shape
from kpt_cli.main import app
from kpt_core.registry import add_backend, remove_backend
from kpt_moe.experts import experts

pytestmark = pytest.mark.usefixtures("made_up_times")
TINY = Shape("prefill", 64, 16, 32, 4, 2, gated=False)
DECODE = Shape("decode", 1, 64, 32, 8, 2, gated=True)


class Wrong(kpt_core.Backend):
    """A backend whose experts leave out what comes after the first 32 tokens."""

    name = "wrong"
    device_types = ("cpu",)

    def kernels(self) -> list[kpt_core.Kernel]:
        return [kpt_core.Kernel("moe.experts", f"{__name__}:first_tokens_only")]


def first_tokens_only(call: kpt_core.Call) -> torch.Tensor:
    right = experts.run_reference(call)
    right[32:] = 0
    return right


@pytest.mark.parametrize("shape", [TINY, DECODE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_every_implementation(shape: Shape, dtype: torch.dtype) -> None:
    with kpt_core.record() as log:
        (line,) = moe.run((shape,), (dtype,), seconds=0.01, seed=0)
    assert isinstance(line, Line)
    assert {selection.op for selection in log} == {"moe.experts"}
    assert [result.implementation for result in line.results] == ["kpt", "eager", "grouped_mm", "dense"]
    assert line.results[0].gain == 1
    for result in line.results:
        assert result.gflops == pytest.approx(shape.flops / result.seconds / 1e9)
        assert result.tokens_per_second == pytest.approx(shape.tokens / result.seconds)


def test_counts_operations() -> None:
    assert TINY.flops == 2 * 2 * (64 * 2) * 16 * 32
    assert DECODE.flops == 2 * 3 * (1 * 2) * 64 * 32


@pytest.fixture
def wrong() -> Iterator[None]:
    add_backend(Wrong())
    yield
    remove_backend("wrong")


@pytest.mark.usefixtures("wrong")
def test_has_no_figures_for_a_wrong_result_and_goes_on() -> None:
    refused, line = moe.run((TINY, DECODE), (torch.float32,), seconds=0.01, seed=0)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("no figures for prefill in torch.float32: KPT's error")
    assert isinstance(line, Line)


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("how", [[], ["--json"]])
def test_command_marks_a_wrong_result_and_fails_at_the_end(monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    monkeypatch.setattr(moe, "QUICK_SHAPES", (TINY, DECODE))
    result = CliRunner().invoke(app, ["bench", "moe", "--quick", "--dtype", "float32", *how], env={"COLUMNS": "160"})
    assert result.exit_code == 1, result.output
    assert "kpt: error: no figures for prefill in torch.float32: KPT's error" in result.stderr
    if how:
        refused, line = json.loads(result.stdout)["lines"]
        assert refused["reason"].startswith("no figures for prefill")
        assert line["gain"] > 0
    else:
        rows = [row.split() for row in result.stdout.splitlines()]
        (marked,) = [row for row in rows if row[:1] == ["64"]]
        assert marked[-1] == "wrong"
        assert any(row[:1] == ["1"] and row[-2:] == ["4.00x", "faster"] for row in rows)


def test_command_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "QUICK_SHAPES", (TINY,))
    result = CliRunner().invoke(app, ["bench", "moe", "--quick", "--json", "--output", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "figures.json").read_text())
    assert [line["dtype"] for line in report["lines"]] == ["float32", "bfloat16"]
    assert report["machine"]["torch"] == torch.__version__


def test_command_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "QUICK_SHAPES", (DECODE,))
    result = CliRunner().invoke(app, ["bench", "moe", "--quick", "--dtype", "float32"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "grouped_mm" in result.output
    assert "2 of 8" in result.output


def test_unknown_dtype_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "moe", "--dtype", "bfloat"])
    assert result.exit_code == 2
    assert "did you mean bfloat16 or" in result.stderr


def test_a_busy_machine_is_told_and_times_agree_with_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "QUICK_SHAPES", (TINY,))
    monkeypatch.setattr(kpt_optimize.Load, "others", lambda load: 0.5)
    result = CliRunner().invoke(app, ["bench", "moe", "--quick", "--json", "--dtype", "float32"])
    assert "the machine is busy: measure again" in result.stderr
    report = json.loads(result.stdout)
    assert report["machine"]["others"] == 0.5
    (line,) = report["lines"]
    kpt, *peers = line["results"]
    for peer in peers:
        assert peer["seconds"] / kpt["seconds"] == pytest.approx(peer["gain"])
