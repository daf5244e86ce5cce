"""`optimize`: what it keeps, what it rolls back, and what it leaves alone."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

import kpt_core
from clock import CLOCK
from kpt_core import InputError, UnknownNameError
from kpt_optimize import Site, apply_plan, measure, optimize


@kpt_core.op("test.linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight, bias)


class Slow(nn.Linear):
    """A linear layer that dawdles: whatever replaces it by a plain one gains for certain."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.sleep(0.002)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Slow(8, 8)
        self.middle = nn.Sequential(nn.ReLU(), Slow(8, 8))
        self.unused = Slow(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Swap:
    """Replace `Slow` by a linear layer whose weights are scaled by `scale`, or one that dawdles more."""

    name: str = "test.swap"
    lossless: bool = True
    level: str = "conservative"
    scale: float = 1.0
    slower: bool = False
    fails: bool = False
    dtype: torch.dtype | None = None
    op: str = "test.linear"
    only: str = ""

    def sites(self, model: nn.Module) -> Iterable[Site]:
        found = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        return [Site(path, self.op) for path in found if self.only in path]

    def replacement(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        if self.fails:
            raise RuntimeError("no way")
        kind = Slower if self.slower else Cast
        new = kind(8, 8)
        new.load_state_dict({name: value.detach() * self.scale for name, value in module.state_dict().items()})
        return new.to(self.dtype or module.weight.dtype)


class Cast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


class Slower(Cast):
    def forward(self, x: Tensor) -> Tensor:
        CLOCK.sleep(0.006)
        return super().forward(x)


def install(monkeypatch: pytest.MonkeyPatch, *rewrites: Swap) -> None:
    module = import_module("kpt_optimize.optimize")  # the function of that name hides it
    monkeypatch.setattr(module, "rewrites", lambda: {rewrite.name: rewrite for rewrite in rewrites})


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def test_keeps_what_is_faster_and_leaves_the_given_model_alone(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap())
    before = copy.deepcopy(model.state_dict())
    result = optimize(model, example_inputs=(x,))
    entries = {entry.module: entry for entry in result.plan.entries}
    assert entries["first"].kept
    assert entries["middle.1"].kept
    assert entries["first"].gain > 1
    assert result.plan.seconds_before / result.plan.seconds_after == pytest.approx(result.plan.gain)
    assert not entries["unused"].kept
    assert "do not reach" in entries["unused"].reason
    assert type(result.model.first) is Cast
    assert type(model.first) is Slow
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(result.model(x), model(x))
    assert result.plan.seconds_after < result.plan.seconds_before


def test_rolls_back_what_is_slower_or_fails(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap(name="test.slower", slower=True), Swap(name="test.fails", fails=True))
    result = optimize(model, example_inputs={"x": x})
    assert not result.plan.kept
    reasons = {entry.rewrite: entry.reason for entry in result.plan.entries if entry.module == "first"}
    assert "slower" in reasons["test.slower"]
    assert reasons["test.fails"] == "it failed: RuntimeError: no way"
    assert all(type(module) is not Slower for module in result.model.modules())


def test_rolls_back_what_exceeds_the_error_budget(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap(scale=1.05))
    result = optimize(model, example_inputs=(x,), max_error=0.01)
    assert not result.plan.kept
    assert result.plan.error == 0
    assert "exceeds the budget" in result.plan.entries[0].reason
    assert result.plan.entries[0].error == pytest.approx(0.05, rel=0.01)


def test_rolls_back_until_the_whole_model_is_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    # Each layer alone is within 6%, both together are not.
    install(monkeypatch, Swap(scale=1.05))
    result = optimize(model, example_inputs=(x,), max_error=0.06)
    assert len(result.plan.kept) == 1
    assert result.plan.error <= 0.06
    assert any("the model's error was" in entry.reason for entry in result.plan.entries)
    assert isinstance(result.model.first, Slow) != isinstance(result.model.middle[1], Slow)


@pytest.mark.parametrize("max_error", [0.01, 0.06])
def test_larger_budgets_keep_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, max_error: float
) -> None:
    install(monkeypatch, Swap(scale=1.05, lossless=False))
    result = optimize(model, example_inputs=(x,), max_error=max_error)
    assert [type(each) is Cast for each in (result.model.first, result.model.middle[1])].count(True) == len(
        result.plan.kept
    )
    budgets = result.plan.budgets
    assert [budget.modules for budget in budgets] == [count for count in (1, 2) if count > len(result.plan.kept)]
    for budget in budgets:
        larger = optimize(model, example_inputs=(x,), max_error=budget.max_error * 1.001).plan
        assert len(larger.kept) >= budget.modules
        assert budget.total == 2
    assert larger.budgets == ()
    assert larger.outlook() == ""


@pytest.mark.parametrize(
    "rewrite", [Swap(scale=1.05), Swap(lossless=False, slower=True), Swap(lossless=False, fails=True)]
)
def test_no_budget_keeps_what_is_lossless_slower_or_fails(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, rewrite: Swap
) -> None:
    install(monkeypatch, rewrite)
    assert optimize(model, example_inputs=(x,), max_error=0.01).plan.budgets == ()


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_a_busy_machine_is_told_once_for_the_whole_plan(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, objective: str
) -> None:
    install(monkeypatch, Swap())
    monkeypatch.setattr(measure.Load, "others", lambda load: 0.5)
    plan = optimize(model, example_inputs=(x,), objective=objective).plan
    assert plan.entries
    assert str(plan).count("the machine is busy") == (objective == "latency")  # bytes are the same whatever the load
    assert all("busy" not in entry.reason for entry in plan.entries)


def test_rolls_everything_back_if_the_model_gets_slower(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap())
    whole = import_module("kpt_optimize.optimize")
    monkeypatch.setattr(whole, "_contest", lambda *_: ([0.1] * 9, [0.2] * 9))
    result = optimize(model, example_inputs=(x,))
    assert not result.plan.kept
    assert isinstance(result.model.first, Slow)
    assert any("together the model was 2.00x slower" in entry.reason for entry in result.plan.entries)
    assert result.plan.seconds_after == result.plan.seconds_before == 0.1


def test_only_the_lossy_one_of_two_rewrites_of_a_module_goes(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    monkeypatch.setattr("kpt_optimize.trial.gain_of", lambda *_: (2.0, 0.0))
    install(monkeypatch, Swap(), Swap(name="test.lossy", lossless=False, scale=1.05))
    result = optimize(model, example_inputs=(x,), max_error=0.051)
    kept = {(entry.module, entry.rewrite) for entry in result.plan.kept}
    assert {("first", "test.swap"), ("middle.1", "test.swap")} < kept
    assert len(kept) == 3
    assert type(result.model.first) is Cast


def test_level_decides_which_rewrites_are_tried(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap(name="test.lossy", lossless=False, level="aggressive"))
    assert not optimize(model, "balanced", example_inputs=(x,)).plan.entries
    assert optimize(model, "aggressive", example_inputs=(x,)).plan.kept


def test_memory_objective_keeps_what_is_smaller_though_slower(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap(slower=True, dtype=torch.bfloat16), Swap(name="test.same"))
    result = optimize(model, objective="memory", example_inputs=(x,))
    assert {entry.rewrite for entry in result.plan.kept} == {"test.swap"}
    assert all(entry.gain == 2 for entry in result.plan.kept)
    assert result.plan.bytes_after < result.plan.bytes_before


def test_revert_one_module_and_all(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap())
    result = optimize(model, example_inputs=(x,), inplace=True)
    assert result.model is model
    assert type(model.first) is Cast
    result.revert("first")
    assert type(model.first) is Slow
    assert type(model.middle[1]) is Cast
    with pytest.raises(UnknownNameError, match="unknown changed module 'first'"):
        result.revert("first")
    result.revert()
    assert type(model.middle[1]) is Slow


def test_plan_applies_to_a_fresh_model(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap(scale=1.001))
    result = optimize(model, example_inputs=(x,))
    applied = apply_plan(model, result.plan)
    assert torch.equal(applied.model(x), result.model(x))
    assert not torch.equal(applied.model(x), model(x))
    applied.revert()
    assert torch.equal(applied.model(x), model(x))
    with pytest.raises(InputError, match="does not apply to this Sequential"):
        apply_plan(nn.Sequential(nn.ReLU()), result.plan)
    install(monkeypatch)
    with pytest.raises(UnknownNameError, match=r"unknown rewrite 'test\.swap'"):
        apply_plan(model, result.plan)


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_of_every_module_is_restored(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, training: bool
) -> None:
    install(monkeypatch, Swap())
    model.train(training)
    # As a frozen norm stays in evaluation mode while the rest trains.
    model.middle.training = not training
    model.middle[1].training = not training
    flags = {path: module.training for path, module in model.named_modules()}
    optimized = optimize(model, example_inputs=(x,))
    for result in (optimized, apply_plan(model, optimized.plan)):
        assert type(result.model.middle[1]) is Cast
        assert {path: module.training for path, module in result.model.named_modules()} == flags
        result.revert()
        assert type(result.model.middle[1]) is Slow
        assert {path: module.training for path, module in result.model.named_modules()} == flags


@pytest.mark.parametrize("path", ["first", None])
def test_an_original_comes_back_in_the_mode_and_on_the_device_of_the_model(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, path: str | None
) -> None:
    install(monkeypatch, Swap())
    model.first.inside = nn.Dropout()
    result = optimize(model, example_inputs=(x,), inplace=True)
    model.eval().to("meta")
    result.revert(path)
    assert type(model.first) is Slow
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


@dataclass
class Output:
    made: object


class Wrapping(nn.Module):
    def __init__(self, wrap: type) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Sequential(Slow(8, 8)), wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(self.inner(x))


def test_the_error_of_numbers_in_a_dataclass_is_told(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    install(monkeypatch, Swap(scale=1.01, lossless=False))
    result = optimize(Wrapping(Output), "aggressive", example_inputs=x)
    assert result.plan.kept
    assert 1e-3 < result.plan.error < 1e-1


def test_an_output_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    install(monkeypatch, Swap())
    with pytest.raises(InputError, match=r"of type str, has no floating tensors to compare"):
        optimize(Wrapping(str), example_inputs=x)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap())
    seen: list[tuple[int, int, str]] = []
    optimize(model, example_inputs=(x,), on_progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == [0, 1, 2, 3]
    assert seen[0][2] == "test.swap at first"
    assert seen[-1] == (3, 3, "done")


def test_wrong_arguments(model: Model, x: Tensor) -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module; got None"):
        optimize(None, example_inputs=(x,))  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown level 'agressive': did you mean 'aggressive'"):
        optimize(model, "agressive", example_inputs=(x,))
    with pytest.raises(UnknownNameError, match="unknown objective 'speed': known: latency, memory"):
        optimize(model, objective="speed", example_inputs=(x,))
    with pytest.raises(InputError, match=r"at least 0; got -0\.1"):
        optimize(model, example_inputs=(x,), max_error=-0.1)
    with pytest.raises(InputError, match=r"example_inputs must be a tensor, a sequence .* got int"):
        optimize(model, example_inputs=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="does not run on the example inputs"):
        optimize(model, example_inputs=(torch.randn(4, 9),))
