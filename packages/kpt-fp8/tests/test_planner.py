import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import kpt_optimize
from kpt_core import InputError, UnknownNameError
from kpt_fp8 import NativeFP8Linear
from kpt_fp8.planner import plan_fp8
from test_rewrites import cpu_clock, installed, slow_linear

__all__ = ["cpu_clock", "installed", "slow_linear"]


class Branches(nn.Module):
    """Eight layers side by side; each counts twice as much for the output as the one before."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        return sum(2.0**number * layer(x) for number, layer in enumerate(self.layers))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Branches()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=generator) for _ in range(2)]


def error_of(model, converted):
    with torch.no_grad():
        pairs = [(converted(x), model(x)) for x in batches()]
    return max(float(((after - before).norm(dim=1) / before.norm(dim=1)).max()) for after, before in pairs)


@pytest.mark.parametrize("budget", [0.0, 0.001, 0.004, 0.01, 0.1])
def test_a_plan_keeps_the_budget_and_uses_it(model, budget, installed):
    planning = plan_fp8(model, batches(), max_error=budget, granularities=["row"])
    kept = [entry.module for entry in planning.plan.kept]
    # All save the same, so the lightest come first.
    assert kept == [f"layers.{number}" for number in range(planning.chosen)]
    assert (len(kept) == 0) == (budget == 0.0)
    assert (len(kept) == 8) == (budget == 0.1)
    applied = kpt_optimize.apply_plan(model, planning.plan)
    error = error_of(model, applied.model)
    assert error <= budget
    assert planning.plan.error == pytest.approx(error, rel=1e-3, abs=1e-9)
    converted = [name for name, each in applied.model.named_modules() if isinstance(each, NativeFP8Linear)]
    assert converted == kept
    if planning.chosen < 8:
        more = [
            replace(entry, kept=entry.kept or entry.module == f"layers.{planning.chosen}")
            for entry in planning.plan.entries
        ]
        beyond = kpt_optimize.apply_plan(model, replace(planning.plan, entries=tuple(more)))
        assert error_of(model, beyond.model) > budget


def test_the_front_trades_error_for_bytes(model, installed):
    planning = plan_fp8(model, batches(), max_error=0.031, granularities=["row", "128x128"])
    errors = [point.predicted_error for point in planning.front]
    saved = [point.bytes_saved for point in planning.front]
    assert errors == sorted(errors)
    assert saved == sorted(saved)
    assert planning.front[-1].layers == 8
    measured = [point for point in planning.front if point.error is not None]
    assert len(measured) >= 3
    for point in measured:
        assert point.error == pytest.approx(point.predicted_error, rel=0.5)
    assert planning.chosen < len(planning.front)
    assert planning.front[planning.chosen - 1].error <= 0.031
    assert [budget.max_error for budget in planning.plan.budgets] == [
        point.error for point in measured if point.error > 0.031
    ]
    *lines, last = str(planning).splitlines()
    kept = len(planning.plan.kept)
    assert last == f"{kept} of 8 layers are converted; error {planning.plan.error:.2%} of at most 3.10%"
    assert len(lines) == 1 + len(planning.front)
    assert [line[0] for line in lines].index(">") == planning.chosen
    document = json.loads(json.dumps(planning.as_dict()))
    assert document["chosen"] == planning.chosen
    assert len(document["front"]) == len(planning.front)


class Uneven(nn.Module):
    """The wide layer gains most for what it costs."""

    def __init__(self):
        super().__init__()
        self.wide, self.small = nn.Linear(64, 512), nn.Linear(64, 64)

    def forward(self, x):
        return torch.cat([self.wide(x), 2 * self.small(x)], -1)


def test_a_layer_beyond_the_budget_does_not_keep_others_from_the_plan(installed):
    torch.manual_seed(0)
    model = Uneven()
    whole = plan_fp8(model, batches(), max_error=1.0, granularities=["row"])
    assert [point.layer for point in whole.front] == ["wide", "small"]
    wide, small = (entry.error for entry in whole.plan.entries)
    assert small < wide
    bound = plan_fp8(model, batches(), max_error=(small + wide) / 2, granularities=["row"])
    assert [entry.module for entry in bound.plan.kept] == ["small"]
    assert bound.plan.entries[0].reason.endswith(f"alone it costs more than the budget: error {wide:.2%}")


def test_a_budget_that_nothing_meets_is_told(model):
    planning = plan_fp8(model, batches(), max_error=1e-9)
    assert (planning.chosen, planning.front, planning.plan.kept) == (0, (), ())
    nothing, more = str(planning).splitlines()
    assert nothing.startswith("no layer is converted; layers.0: alone it costs more than the budget: error 0.0")
    (budget,) = planning.plan.budgets
    assert (budget.modules, budget.total) == (1, 8)
    assert more.startswith("Larger budgets, by the errors measured: max_error=0.0")
    assert more.endswith(" would keep 1 of 8 modules.")
    assert len(plan_fp8(model, batches(), max_error=budget.max_error).plan.kept) == 1


def test_a_layer_by_itself_has_no_place_to_be_replaced_at():
    with pytest.raises(InputError, match=r"plan_fp8: a single nn\.Linear has no place.*from_linear"):
        plan_fp8(nn.Linear(64, 64), batches())


def test_the_plan_is_the_cores_and_goes_there_and_back(model, installed, tmp_path):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    planning = plan_fp8(model, batches(), max_error=0.004)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    planning.plan.save(tmp_path / "plan.json")
    applied = kpt_optimize.apply_plan(model, tmp_path / "plan.json")
    plan = applied.plan
    assert plan == planning.plan
    assert {entry.rewrite for entry in plan.entries} <= {"fp8.linear", "fp8.linear_128x128"}
    assert all(entry.kernel == "kpt_fp8.torch_kernels.linear:forward" for entry in plan.entries)
    assert plan.bytes_before - plan.bytes_after == planning.front[planning.chosen - 1].bytes_saved
    assert kpt_optimize.parameter_bytes(applied.model) == plan.bytes_after
    applied.revert()
    assert not any(isinstance(each, NativeFP8Linear) for each in applied.model.modules())


def test_a_plan_for_latency_takes_what_is_faster(installed, slow_linear):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), FirstRow(), nn.Linear(512, 64))
    plan = plan_fp8(model, [torch.randn(128, 512)], objective="latency", max_error=1.0, granularities=["row"]).plan
    assert [entry.module for entry in plan.kept] == ["0", "1"]
    first, second, last = plan.entries
    assert first.gain == second.gain > 1  # of equal shapes one is timed
    assert plan.gain > 1
    assert re.search("slower|as fast|too noisy", last.reason)


class FirstRow(nn.Module):
    """One row of float32 is read faster than it is decoded."""

    def forward(self, x):
        return x[:1]


def test_a_plan_that_is_slower_as_a_whole_converts_nothing(model, monkeypatch, installed, cpu_clock):
    monkeypatch.setattr("kpt_fp8.planner._VersionTrial.times", lambda *_: [[2.0] * 5, [1.0] * 5])
    planning = plan_fp8(model, [torch.randn(1, 64)], objective="latency", max_error=1.0, granularities=["row"])
    assert planning.plan.kept == ()
    assert planning.chosen == 0
    assert planning.plan.error == 0.0
    assert planning.plan.bytes_after == planning.plan.bytes_before
    assert all(
        "together the model was " in entry.reason and "slower" in entry.reason for entry in planning.plan.entries
    )


def test_the_budget_of_the_loss(model):
    data = batches()
    with torch.no_grad():
        exact = {id(batch): model(batch) for batch in data}

    def loss(output, batch):
        return (output - exact[id(batch)]).square().mean()

    free = plan_fp8(model, data, max_error=1.0, loss=loss)
    assert free.chosen == len(free.front)
    budget = free.front[-1].loss_change / 10
    assert budget > 0
    bound = plan_fp8(model, data, max_error=1.0, max_loss_change=budget, loss=loss)
    assert 0 < bound.chosen < free.chosen
    assert bound.front[bound.chosen - 1].loss_change <= budget
    assert bound.chosen == len(bound.front) or bound.front[bound.chosen].loss_change > budget
    assert "alone it costs more than the budget" in bound.plan.entries[-1].reason
    with pytest.raises(InputError, match="max_loss_change needs a loss"):
        plan_fp8(model, data, max_loss_change=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_error": -1.0}, "max_error must be at least 0; got -1.0"),
        ({"max_error": float("nan")}, "max_error must be at least 0; got nan"),
        ({"max_loss_change": -0.1}, "max_loss_change must be at least 0; got -0.1"),
        ({"max_batches": 0}, "max_batches must be at least 1; got 0"),
        ({"exclude": "layers.*"}, "no layer to convert"),
    ],
)
def test_wrong_input_is_a_sentence(model, options, message):
    with pytest.raises(InputError, match=message):
        plan_fp8(model, batches(), **options)
    with pytest.raises(UnknownNameError, match="objective"):
        plan_fp8(model, batches(), objective="speed")
