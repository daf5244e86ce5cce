"""`ModelOptimizer.optimize_for_inference`: what it keeps, what it rolls back, what it leaves alone."""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dawdling import Clock, Dawdling, always, in_float32, never, not_in_float32, only, relative, sample
from torch import Tensor, nn

import kpt_core
from kpt_core import discovery
from kpt_optimize import Site
from kpt_optimize.model import ModelOptimizer, OptimizationReport, OptimizationWarning, OptimizerConfig
from kpt_optimize.model.steps import STEPS

NAMES = {step.name for step in STEPS if step.inference}


def outcome(report: OptimizationReport | None, step: str) -> Any:
    assert report is not None
    (found,) = [outcome for outcome in report.outcomes if outcome.step == step]
    return found


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """The output in float64, of a copy in evaluation mode."""
    with torch.no_grad():
        return copy.deepcopy(model).double().eval()(x.double())  # type: ignore[no-any-return]


def test_a_new_optimizer_is_balanced_and_has_no_report() -> None:
    optimizer = ModelOptimizer()
    assert (optimizer.level, optimizer.device, optimizer.report) == ("balanced", None, None)
    assert optimizer.config == OptimizerConfig()


@pytest.mark.parametrize(
    ("level", "precision", "graph"),
    [
        ("conservative", "belongs to level 'balanced'", "belongs to level 'aggressive'"),
        ("balanced", None, "belongs to level 'aggressive'"),
        ("aggressive", None, "needs an accelerator; the model is on cpu"),
    ],
)
def test_a_level_decides_what_is_tried(clock: Clock, level: str, precision: str | None, graph: str) -> None:
    model = Dawdling(clock, in_float32)
    optimizer = ModelOptimizer(level, config=only("mixed_precision", "cuda_graph"))
    found = optimizer.optimize_for_inference(model, sample())
    report = found.report
    assert optimizer.report is report
    assert {outcome.step for outcome in report.outcomes} == NAMES
    assert outcome(report, "cuda_graph").status == "not tried"
    assert graph in outcome(report, "cuda_graph").reason
    assert outcome(report, "compile").reason == "skipped, as the configuration says"
    if precision is not None:
        assert precision in outcome(report, "mixed_precision").reason
        assert report.kept == ()
        assert found.model.module.first.weight.dtype is torch.float32
    else:
        assert outcome(report, "mixed_precision").status == "kept"
        assert found.model.module.first.weight.dtype is torch.bfloat16


def test_half_precision_that_pays_is_kept_with_its_figures(clock: Clock) -> None:
    model, x = Dawdling(clock, in_float32), sample()
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_inference(model, x)
    kept = outcome(found.report, "mixed_precision")
    assert (kept.status, kept.setting) == ("kept", "weights bfloat16")
    assert kept.gain > 10
    assert kept.reason.startswith(f"{kept.gain:.2f}x faster")
    y = found.model(x)
    assert y.dtype is torch.float32
    assert 0 < relative(y, exact(model, x)) < 2e-2
    assert kept.error == pytest.approx(relative(y, model.eval()(x)))
    assert found.report.error == kept.error
    assert found.report.seconds_before == pytest.approx(0.00201, rel=0.02)
    assert found.report.seconds_after == pytest.approx(1e-5, rel=0.02)
    assert found.report.bytes_before == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert found.report.bytes_after < 0.52 * found.report.bytes_before


def test_half_precision_may_be_float16(clock: Clock) -> None:
    model, x = Dawdling(clock, in_float32), sample()
    optimizer = ModelOptimizer(config=only("mixed_precision", dtype=torch.float16))
    found = optimizer.optimize_for_inference(model, x)
    assert found.model.module.first.weight.dtype is torch.float16
    assert relative(found.model(x), exact(model, x)) < 2e-3


def test_what_is_slower_is_rolled_back(clock: Clock) -> None:
    model, x = Dawdling(clock, not_in_float32), sample()
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_inference(model, x)
    back = outcome(found.report, "mixed_precision")
    assert back.status == "rolled back"
    assert back.gain < 0.1
    assert "x slower" in back.reason
    assert torch.equal(found.model(x), model.eval()(x))
    assert found.report.error == 0


def test_what_exceeds_the_error_budget_is_rolled_back_however_fast(clock: Clock) -> None:
    model, x = Dawdling(clock, in_float32), sample()
    found = ModelOptimizer(config=only("mixed_precision", max_error=1e-6)).optimize_for_inference(model, x)
    back = outcome(found.report, "mixed_precision")
    assert back.status == "rolled back"
    assert "exceeds the budget of 1.0e-06" in back.reason
    assert back.error > 1e-6
    assert torch.equal(found.model(x), model.eval()(x))


@pytest.mark.parametrize(("level", "status"), [("balanced", "rolled back"), ("aggressive", "kept")])
def test_a_level_decides_how_large_an_error_may_be(clock: Clock, level: str, status: str) -> None:
    class Cancelling(Dawdling):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) + 16) - 16

    optimizer = ModelOptimizer(level, config=only("mixed_precision"))
    found = optimizer.optimize_for_inference(Cancelling(clock, in_float32), sample())
    tried = outcome(found.report, "mixed_precision")
    assert tried.status == status
    assert 2e-2 < tried.error < 1e-1


@pytest.mark.parametrize("training", [False, True])
def test_the_original_stays_as_it_is(clock: Clock, training: bool) -> None:
    model = Dawdling(clock, in_float32).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    found = ModelOptimizer("aggressive", config=only("mixed_precision", "padding", "compile")).optimize_for_inference(
        model, sample()
    )
    assert found.report.kept
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: value.dtype for name, value in model.state_dict().items()} == {n: v.dtype for n, v in before.items()}
    assert dict(model.named_modules()) == modules
    assert all(module.training is training for module in model.modules())
    assert not {id(p) for p in found.model.parameters()} & {id(p) for p in model.parameters()}


def test_a_compiled_model_runs_what_the_compiler_made(clock: Clock) -> None:
    runs: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    model, x = Dawdling(clock, always), sample()
    found = ModelOptimizer("conservative", config=only("compile", compile_backend=compiler)).optimize_for_inference(
        model, x
    )
    assert outcome(found.report, "compile").status == "kept"
    assert outcome(found.report, "compile").preparation_seconds > 0
    runs.clear()
    assert relative(found.model(x), exact(model, x)) < 1e-6
    assert runs


def test_a_step_that_fails_is_rolled_back_with_a_warning(clock: Clock) -> None:
    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    model, x = Dawdling(clock, always), sample()
    optimizer = ModelOptimizer(config=only("compile", compile_backend=compiler))
    with pytest.warns(OptimizationWarning, match="step 'compile' was rolled back: it failed: .*no compiler here"):
        found = optimizer.optimize_for_inference(model, x)
    assert outcome(found.report, "compile").status == "rolled back"
    assert torch.equal(found.model(x), model.eval()(x))


@pytest.mark.parametrize(
    ("level", "mode"),
    [
        ("conservative", "default"),
        ("balanced", "max-autotune-no-cudagraphs"),
        ("aggressive", "max-autotune-no-cudagraphs"),  # the modes that capture CUDA graphs are for CUDA devices
    ],
)
def test_each_level_has_its_mode_of_the_compiler(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, level: str, mode: str
) -> None:
    """torch.compile is replaced by one that writes down how it was called."""
    asked = []

    def compiled(module: nn.Module, **options: Any) -> nn.Module:
        asked.append(options)
        return module

    monkeypatch.setattr(torch, "compile", compiled)
    config = only("compile", compile_backend="inductor")
    found = ModelOptimizer(level, config=config).optimize_for_inference(Dawdling(clock, always), sample())
    assert [(options["backend"], options["mode"]) for options in asked] == [("inductor", mode)]
    assert outcome(found.report, "compile").setting == mode


def test_the_real_compiler_gives_the_same_numbers() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU()), sample(width=16)
    config = only("compile", compile_backend="inductor")
    found = ModelOptimizer("conservative", config=config).optimize_for_inference(model, x)
    tried = outcome(found.report, "compile")
    assert tried.status in ("kept", "rolled back")
    assert tried.gain > 0
    assert tried.error < 1e-6
    assert relative(found.model(x), exact(model, x)) < 1e-6


def test_channels_last_that_pays_is_kept(clock: Clock) -> None:
    class Convolution(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, self.weight))
            clock.sleep(0.0 if last else 0.002)
            return super().forward(x)

    model, x = nn.Sequential(Convolution(4, 6, 3)), torch.randn(2, 4, 7, 7)
    found = ModelOptimizer("conservative", config=only("channels_last")).optimize_for_inference(model, x)
    assert outcome(found.report, "channels_last").status == "kept"
    assert relative(found.model(x), exact(model, x)) < 1e-6
    assert model[0].weight.is_contiguous()


def test_padding_that_pays_is_kept_and_keeps_the_names_of_the_weights(clock: Clock) -> None:
    def unpadded(module: nn.Module, x: Tensor) -> bool:
        return any(type(child) is nn.Linear for child in module.modules())

    model, x = Dawdling(clock, unpadded, sizes=(23, 39, 21)), sample(width=23)
    found = ModelOptimizer("conservative", config=only("padding")).optimize_for_inference(model, x)
    assert outcome(found.report, "padding").setting == "2 linear layers"
    assert outcome(found.report, "padding").status == "kept"
    assert relative(found.model(x), exact(model, x)) < 1e-6
    state = found.model.module.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in model.state_dict().items()}


def test_good_sizes_are_not_padded(clock: Clock) -> None:
    found = ModelOptimizer(config=only("padding")).optimize_for_inference(Dawdling(clock, never), sample())
    assert outcome(found.report, "padding").reason == "the sizes of every linear layer suit matrix units"


@kpt_core.op("nvidia_optimizer.linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight, bias)


class Served(nn.Linear):
    """A linear layer that an op serves."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SlowLinear(nn.Linear):
    """A linear layer that a rewrite can better."""

    clock: Clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(0.002)
        return super().forward(x)


@dataclass(frozen=True)
class Serve:
    """Have the op serve slow layers."""

    name: str = "nvidia_optimizer.serve"
    lossless: bool = True
    level: str = "conservative"

    def sites(self, model: nn.Module) -> Iterable[Site]:
        return [
            Site(path, "nvidia_optimizer.linear")
            for path, module in model.named_modules()
            if isinstance(module, SlowLinear)
        ]

    def replacement(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        served = Served(module.in_features, module.out_features)
        served.weight, served.bias = module.weight, module.bias
        return served


def test_rewrites_of_modules_come_first_and_their_plan_is_reported(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(discovery._found, "kpt.rewrites", {"nvidia_optimizer.serve": Serve()})
    monkeypatch.setattr(SlowLinear, "clock", clock, raising=False)
    model, x = nn.Sequential(SlowLinear(8, 8), nn.ReLU(), SlowLinear(8, 4)), sample(width=8)
    found = ModelOptimizer("conservative", config=only("rewrites")).optimize_for_inference(model, x)
    assert outcome(found.report, "rewrites").status == "kept"
    assert found.report.plan is not None
    assert [entry.module for entry in found.report.plan.kept] == ["0", "2"]
    assert [type(module) for module in found.model.module] == [Served, nn.ReLU, Served]
    assert relative(found.model(x), exact(model, x)) < 1e-6
    assert isinstance(model[0], SlowLinear)


def test_for_memory_the_smaller_model_is_kept_though_it_is_slower(clock: Clock) -> None:
    model = Dawdling(clock, not_in_float32)
    config = OptimizerConfig(objective="memory", compile_backend="eager", seconds=0.05)
    found = ModelOptimizer(config=config).optimize_for_inference(model, sample())
    kept = outcome(found.report, "mixed_precision")
    assert kept.status == "kept"
    assert kept.gain == found.report.bytes_before / found.report.bytes_after
    assert kept.reason == f"{kept.gain:.2f}x smaller"
    assert outcome(found.report, "compile").reason == "changes nothing of the objective 'memory'"


def test_without_sample_inputs_nothing_is_applied_and_it_says_so(clock: Clock) -> None:
    model = Dawdling(clock, in_float32)
    optimizer = ModelOptimizer("aggressive")
    with pytest.warns(OptimizationWarning, match="without sample inputs nothing can be measured"):
        found = optimizer.optimize_for_inference(model)
    assert {outcome.status for outcome in found.report.outcomes} == {"not tried"}
    assert outcome(found.report, "mixed_precision").reason == "needs sample inputs to be measured on"
    assert found.report.seconds_before is None
    assert "nothing was measured" in str(found.report)
    assert found.report.recommendations
    assert not found.model.training
    assert not found.model(sample()).requires_grad
    assert torch.equal(found.model(sample()), model.eval()(sample()))


def test_tables_that_the_model_computes_and_tied_weights_survive_half_precision(clock: Clock) -> None:
    class Tied(nn.Module):
        table: Tensor
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("table", torch.arange(8) * 1.001, persistent=False)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.embedding(ids)
            clock.sleep(0.002 if hidden.dtype is torch.float32 else 0.0)
            return self.head((hidden * self.scale + self.table.sin().to(hidden.dtype)).tanh())  # type: ignore[no-any-return]

    ids = torch.arange(11).view(1, 11)
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_inference(Tied(), {"ids": ids})
    module = found.model.module
    assert found.report.kept
    assert module.table.dtype is torch.float32
    assert module.scale.dtype is torch.bfloat16
    assert module.head.weight is module.embedding.weight
    assert found.model(ids=ids).dtype is torch.float32


def test_the_report_is_a_table_and_json(clock: Clock) -> None:
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_inference(Dawdling(clock, in_float32), sample())
    data = json.loads(json.dumps(found.report.as_dict(), allow_nan=False))
    assert data["outcomes"][-1]["step"] == found.report.outcomes[-1].step
    text = str(found.report)
    assert all(outcome.step in text and outcome.reason in text for outcome in found.report.outcomes)
    assert "Dawdling for inference on cpu, level balanced: 2.01 ms before, 0.01 ms after" in text


def test_a_model_for_inference_refuses_training(clock: Clock) -> None:
    found = ModelOptimizer(config=only()).optimize_for_inference(Dawdling(clock, never), sample())
    with pytest.raises(kpt_core.InputError, match="prepared for inference: train the original"):
        found.model.train()
    assert not found.model.eval().training
