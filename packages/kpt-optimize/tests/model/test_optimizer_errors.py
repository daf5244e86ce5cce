"""Bad input of `ModelOptimizer`: an error that names the value, what was expected, and the next step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dawdling import sample
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError
from kpt_optimize.model import ModelOptimizer, OptimizationWarning, OptimizerConfig
from kpt_optimize.model.steps import STEPS

METHODS = ("optimize_for_inference", "optimize_for_training", "recommend")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [None, "gpt2", nn.Linear])
def test_a_model_must_be_a_module(method: str, model: Any) -> None:
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module; got .*: pass the loaded model"):
        getattr(ModelOptimizer(), method)(model, sample())


@pytest.mark.parametrize(
    ("level", "nearest"), [("balance", "balanced"), ("agressive", "aggressive"), ("Conservative", "conservative")]
)
def test_an_unknown_level_offers_the_nearest(level: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown level '{level}': did you mean '{nearest}'"):
        ModelOptimizer(level)


def test_an_unknown_step_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown step 'cuda_graphs': did you mean 'cuda_graph'"):
        ModelOptimizer(config=OptimizerConfig(skip=frozenset({"cuda_graphs"})))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype must be torch.bfloat16 or torch.float16; got torch.float32"),
        ({"max_error": -1.0}, "max_error must be at least 0; got -1.0"),
        ({"max_error": float("nan")}, "max_error must be at least 0; got nan"),
        ({"seconds": 0.0}, "seconds must be above 0"),
    ],
)
def test_a_bad_configuration_is_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**options)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown objective 'speed'"):
        OptimizerConfig(objective="speed")


@pytest.mark.parametrize("method", METHODS)
def test_sample_inputs_must_be_a_call(method: str) -> None:
    with pytest.raises(InputError, match=r"sample inputs must be a tensor, a sequence .* got int"):
        getattr(ModelOptimizer(), method)(nn.Linear(3, 3), 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_sample_that_the_model_refuses_is_told_with_its_reason(method: str) -> None:
    with pytest.raises(InputError, match=r"does not run on the sample inputs: RuntimeError: .*8x5.*3x3"):
        getattr(ModelOptimizer(), method)(nn.Linear(3, 3), sample(width=5))


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_model_that_gives_another_output_each_time_is_refused(method: str) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(())

    with pytest.raises(InputError, match="gives another output when it runs the sample again"):
        getattr(ModelOptimizer(), method)(Noisy(3, 3), sample(width=3))


def test_training_is_not_for_memory() -> None:
    optimizer = ModelOptimizer(config=OptimizerConfig(objective="memory"))
    with pytest.raises(InputError, match="the objective must be 'latency', got 'memory'"):
        optimizer.optimize_for_training(nn.Linear(3, 3), sample(width=3))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(5, 7).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"parameter of shape \[7, 5\] that is not the model's"):
        ModelOptimizer().optimize_for_training(nn.Linear(3, 3), sample(width=3), optimizer=other)


@pytest.mark.parametrize("loss", [lambda output: output, lambda output: 1.0])
def test_a_loss_must_be_a_scalar_tensor(loss: Any) -> None:
    with pytest.raises(InputError, match=r"the loss must be a scalar tensor; got .*: pass loss="):
        ModelOptimizer().optimize_for_training(nn.Linear(3, 3), sample(width=3), loss)


def test_a_step_that_fails_while_it_is_proposed_is_rolled_back_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(situation: Any) -> str:
        raise RuntimeError("no such luck")

    steps = tuple(replace(step, change=fail) if step.name == "mixed_precision" else step for step in STEPS)
    monkeypatch.setattr("kpt_optimize.model.trials.STEPS", steps)
    skipped = frozenset(step.name for step in steps) - {"mixed_precision"}
    optimizer = ModelOptimizer("balanced", config=OptimizerConfig(skip=skipped))
    with pytest.warns(
        OptimizationWarning, match="'mixed_precision' was rolled back: it failed: RuntimeError: no such luck"
    ):
        report = optimizer.optimize_for_inference(nn.Linear(24, 8), sample()).report
    (outcome,) = (step for step in report.outcomes if step.step == "mixed_precision")
    assert (outcome.status, outcome.reason) == ("rolled back", "it failed: RuntimeError: no such luck")
    assert report.seconds_before == report.seconds_after
