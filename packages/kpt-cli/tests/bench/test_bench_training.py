"""`kpt bench moe-training`: what it reports, and when it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

import kpt_core
from kpt_cli.bench import moe
from kpt_cli.bench.contest import Refused
from kpt_cli.bench.moe import Shape
from kpt_cli.main import app
from kpt_core.registry import add_backend, remove_backend
from kpt_moe.experts import experts

pytestmark = pytest.mark.usefixtures("made_up_times")
TINY = Shape("step", 64, 16, 32, 4, 2, gated=True)


class Wrong(kpt_core.Backend):
    """A backend whose experts are right and whose gradient of the tokens is off by a tenth."""

    name = "wrong"
    device_types = ("cpu",)

    def kernels(self) -> list[kpt_core.Kernel]:
        return [kpt_core.Kernel("moe.experts", f"{__name__}:wrong_gradient", differentiable=True)]


def wrong_gradient(call: kpt_core.Call) -> torch.Tensor:
    x = call.x + 0.1 * (call.x - call.x.detach())
    return experts.run_reference(call._replace(x=x))


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe is a process that imports transformers: one test has them."""
    monkeypatch.setattr(moe, "_peak_of_step", lambda *given: 2**20)


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_every_implementation(dtype: torch.dtype) -> None:
    (line,) = moe.run((TINY,), (dtype,), seconds=0.01, seed=0, training=True)
    assert isinstance(line, moe.TrainingLine)
    assert [result.implementation for result in line.results] == ["kpt", "eager", "grouped_mm"]
    assert line.results[0].gain == 1
    assert 0 < line.routing_share < 1
    for result in line.results:
        assert result.gflops == pytest.approx(3 * TINY.flops / result.seconds / 1e9)
        assert result.peak == 2**20


@pytest.mark.slow
def test_peak_grows_with_the_tokens() -> None:
    small, large = (
        moe._peak_of_step(Shape("step", tokens, 256, 512, 4, 2, gated=True), torch.float32, "eager", 0)
        for tokens in (64, 4096)
    )
    saved = 4096 * 2 * 1024 * 4  # the pre-activation of the gate and up projections
    assert large - small > saved


@pytest.mark.usefixtures("no_probe")
def test_has_no_figures_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "QUICK_TRAINING_SHAPES", (TINY,))
    add_backend(Wrong())
    try:
        (refused,) = moe.run((TINY,), (torch.float32,), seconds=0.01, seed=0, training=True)
        command = ["bench", "moe-training", "--quick", "--dtype", "float32"]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "170"})
    finally:
        remove_backend("wrong")
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("no figures for step in torch.float32: KPT's error of gradient 0")
    assert result.exit_code == 1
    assert "fp32    wrong" in result.stdout
    assert refused.reason in result.stderr.replace("\n", " ")


@pytest.mark.usefixtures("no_probe")
def test_command_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "QUICK_TRAINING_SHAPES", (TINY,))
    command = ["bench", "moe-training", "--quick", "--dtype", "float32"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "170"})
    assert shown.exit_code == 0, shown.output
    assert "grouped_mm peak" in shown.output
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    (line,) = json.loads(result.stdout)["lines"]
    assert line["best_peer"] in ("eager", "grouped_mm")
