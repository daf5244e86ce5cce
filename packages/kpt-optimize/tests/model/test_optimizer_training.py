"""`ModelOptimizer.optimize_for_training`: gradients and updates are right, and what doesn't pay is rolled back."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from dawdling import Clock, Dawdling, always, in_float32, never, not_in_float32, only, relative, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from kpt_optimize.model import ModelOptimizer, OptimizationWarning
from kpt_optimize.model.training import optimizer_for


def status(found: Any, step: str) -> tuple[str, str]:
    (outcome,) = [outcome for outcome in found.report.outcomes if outcome.step == step]
    return outcome.status, outcome.reason


def square(output: Tensor) -> Tensor:
    return output.float().square().sum()


def exact_gradients(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Gradients in float64, without dropout."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss(twin(x.double())).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters() if parameter.grad is not None}


def quiet(model: Dawdling) -> Dawdling:
    """The model without dropout, so that a step can be compared."""
    model.dropout.p = 0.0
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_that_pays_is_kept_and_its_gradients_are_right(clock: Clock, dtype: torch.dtype) -> None:
    model, x = quiet(Dawdling(clock, in_float32)), sample()
    optimizer = ModelOptimizer("aggressive", config=only("mixed_precision", dtype=dtype))
    found = optimizer.optimize_for_training(model, x, square)
    assert status(found, "mixed_precision")[0] == "kept"
    assert found.scaler.is_enabled() is (dtype is torch.float16)
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.float32}
    expected = exact_gradients(model, x, lambda output: output.square().sum())
    loss = found.step(x)
    gradients = {name: p.grad for name, p in found.model.module.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    difference = sum((gradients[name] - expected[name]).square().sum() for name in expected).sqrt()
    size = sum(value.square().sum() for value in expected.values()).sqrt()
    assert 0 < difference / size < 5e-2
    assert loss.item() == pytest.approx(model.double()(x.double()).square().sum().item(), rel=2e-2)


def test_what_is_slower_is_rolled_back(clock: Clock) -> None:
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_training(
        Dawdling(clock, not_in_float32), sample()
    )
    assert status(found, "mixed_precision")[0] == "rolled back"
    assert "x slower" in status(found, "mixed_precision")[1]
    assert found.report.kept == ()


def test_wrong_gradients_are_rolled_back_though_the_output_is_right_and_fast(clock: Clock) -> None:
    def doubling(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return tuple(output.detach() + 2 * (output - output.detach()) for output in graph(*args))

        return run

    model, x = quiet(Dawdling(clock, always)), sample()
    found = ModelOptimizer(config=only("compile", compile_backend=doubling)).optimize_for_training(model, x)
    name, reason = status(found, "compile")
    assert name == "rolled back"
    assert reason.startswith("error 1.0e+00 exceeds the budget")


def test_trials_leave_weights_statistics_and_the_optimizer_where_they_were(clock: Clock) -> None:
    model, x = Dawdling(clock, in_float32), sample()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    square(model(x)).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_training(model, x, square, optimizer)
    assert found.report.kept
    for state in (model.state_dict(), found.model.module.state_dict()):
        assert all(torch.equal(before[name], value) for name, value in state.items())
    assert found.optimizer is not None
    for owner, parameters in ((optimizer, model.parameters()), (found.optimizer, found.model.parameters())):
        buffers = [owner.state[p]["momentum_buffer"] for p in parameters]
        assert all(torch.equal(a, b) for a, b in zip(momentum, buffers, strict=True))
    assert found.optimizer.param_groups[0]["lr"] == 0.1
    assert {id(p) for p in found.model.parameters()} == {id(p) for p in found.optimizer.param_groups[0]["params"]}
    assert not {id(p) for p in found.model.parameters()} & {id(p) for p in model.parameters()}


@pytest.fixture
def _slow_unless_fused(clock: Clock) -> Iterator[None]:
    def dawdle(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        clock.sleep(0.0 if optimizer.param_groups[0].get("fused") else 0.002)

    handle: RemovableHandle = register_optimizer_step_pre_hook(dawdle)
    yield
    handle.remove()


@pytest.mark.usefixtures("_slow_unless_fused")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ],
)
def test_a_fused_optimizer_that_pays_trains_as_the_given_one(
    clock: Clock, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model, x = quiet(Dawdling(clock, never)), sample()
    found = ModelOptimizer("conservative", config=only("fused_optimizer")).optimize_for_training(
        model, x, square, kind(model.parameters(), **options)
    )
    assert status(found, "fused_optimizer")[0] == "kept"
    assert found.optimizer is not None
    assert type(found.optimizer) is kind
    assert found.optimizer.param_groups[0]["fused"] is True
    twin = copy.deepcopy(model).double()
    reference = kind(twin.parameters(), **options)
    for _ in range(3):
        loss = found.step(x)
        reference.zero_grad()
        expected = twin(x.double()).square().sum()
        expected.backward()
        reference.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, parameter in twin.named_parameters():
        start = model.get_parameter(name).double()
        moved = found.model.module.get_parameter(name).double() - start
        if name != "first.bias":  # the norm takes it out: its gradient is zero up to rounding, which Adam divides by
            assert relative(moved, parameter - start) < 1e-3


@pytest.mark.usefixtures("_slow_unless_fused")
def test_a_fused_optimizer_goes_on_from_the_state_of_the_given_one(clock: Clock) -> None:
    model, x = quiet(Dawdling(clock, never)), sample()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square(model(x)).backward()
    optimizer.step()
    found = ModelOptimizer("conservative", config=only("fused_optimizer")).optimize_for_training(
        model, x, square, optimizer
    )
    assert found.report.kept
    assert found.optimizer is not None
    steps = [found.optimizer.state[p]["step"].item() for p in found.model.parameters()]
    assert steps == [1.0] * len(steps)
    for mine, theirs in zip(found.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.optimizer.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (None, "needs the optimizer: pass it"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no fused form; Adam, AdamW, SGD, Adagrad have one"),
        (lambda p: torch.optim.AdamW(p, fused=True), "AdamW is fused already"),
    ],
)
def test_the_fused_optimizer_is_not_tried_for_a_reason(clock: Clock, make: Any, reason: str) -> None:
    model = Dawdling(clock, never)
    optimizer = None if make is None else make(model.parameters())
    found = ModelOptimizer(config=only("fused_optimizer")).optimize_for_training(model, sample(), square, optimizer)
    assert status(found, "fused_optimizer") == ("not tried", reason)


def test_modes_of_modules_come_back(clock: Clock) -> None:
    model = Dawdling(clock, in_float32).train()
    model.norm.eval()  # frozen
    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_training(model, sample())
    assert found.report.kept
    for module in (model, found.model.module):
        assert module.training
        assert module.dropout.training
        assert not module.norm.training
    assert torch.equal(found.model.module.norm.running_mean, torch.zeros(40))
    outputs = [found.model(sample()) for _ in range(2)]
    assert not torch.equal(*outputs)  # dropout is at work again


def test_a_model_in_evaluation_mode_is_made_ready_to_train_and_left_alone(clock: Clock) -> None:
    model = Dawdling(clock, never).eval()
    found = ModelOptimizer(config=only()).optimize_for_training(model, sample())
    assert all(module.training for module in found.model.modules())
    assert not any(module.training for module in model.modules())


def test_a_model_with_dropout_of_its_own_is_measured_in_evaluation_mode(clock: Clock) -> None:
    class Dropping(Dawdling):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    found = ModelOptimizer(config=only("mixed_precision")).optimize_for_training(Dropping(clock, in_float32), sample())
    assert status(found, "mixed_precision")[0] == "kept"
    assert found.model.module.training
    assert not torch.equal(found.model(sample()), found.model(sample()))


def test_the_output_s_own_loss_is_taken(clock: Clock) -> None:
    class Output(dict[str, Tensor]):
        @property
        def loss(self) -> Tensor:
            return self["loss"]

    class Labelled(Dawdling):
        def forward(self, x: Tensor, labels: Tensor) -> Output:  # type: ignore[override]
            return Output(loss=F.cross_entropy(super().forward(x), labels))

    model = quiet(Labelled(clock, never))
    call = {"x": sample(), "labels": torch.arange(8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = ModelOptimizer(config=only()).optimize_for_training(model, call, optimizer=optimizer)
    losses = [found.step(call).item() for _ in range(5)]
    assert losses[0] == pytest.approx(F.cross_entropy(Dawdling.forward(model, sample()), torch.arange(8)).item())
    assert losses[-1] < losses[0]


def test_the_loss_of_a_step_may_be_another(clock: Clock) -> None:
    model = quiet(Dawdling(clock, never))
    found = ModelOptimizer(config=only()).optimize_for_training(model, sample())
    target = sample(2)
    loss = found.step(sample(), lambda output: F.mse_loss(output, target))
    assert loss.item() == pytest.approx(F.mse_loss(model(sample()), target).item())


def test_without_sample_inputs_nothing_is_applied_and_it_says_so(clock: Clock) -> None:
    model = Dawdling(clock, in_float32).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(OptimizationWarning, match="without sample inputs nothing can be measured"):
        found = ModelOptimizer().optimize_for_training(model, None, square, optimizer)
    assert found.report is not None
    assert {outcome.status for outcome in found.report.outcomes} == {"not tried"}
    assert any(recommendation.what == "fuse the optimiser" for recommendation in found.report.recommendations)
    assert found.model.training
    start = found.model.module.first.weight.detach().clone()
    found.step(sample())
    assert not torch.equal(found.model.module.first.weight, start)


@pytest.mark.usefixtures("_slow_unless_fused")
def test_a_fused_optimizer_that_moves_the_weights_otherwise_is_rolled_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(optimizer: Any, source: nn.Module, target: nn.Module, *, fused: bool = False) -> Any:
        made = optimizer_for(optimizer, source, target, fused=fused)
        for group in made.param_groups:
            group["lr"] *= 1.01 if fused else 1.0
        return made

    monkeypatch.setattr("kpt_optimize.model.trials.optimizer_for", wrong)
    model = quiet(Dawdling(clock, never))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = ModelOptimizer("conservative", config=only("fused_optimizer")).optimize_for_training(
        model, sample(), square, optimizer
    )
    name, reason = status(found, "fused_optimizer")
    assert name == "rolled back"
    assert reason.startswith(("error 1.0e-02 exceeds the budget", "error 9.9e-03 exceeds the budget"))
