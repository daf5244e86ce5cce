"""Schedules of capacity, of dropout of experts and of their warm-up."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from kpt_core import InputError
from kpt_moe.scheduling import (
    CapacitySchedule,
    ExpertDropout,
    ExpertWarmup,
)
from scheduled import EXPERTS, HIDDEN, TOP_K, make, used

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow


def test_capacity_goes_evenly_from_start_to_end():
    layer = make(capacity_factor=5.0)
    schedule = CapacitySchedule(layer, 2.0, 1.0, 4)
    have = [layer.router.capacity_factor]
    for _ in range(5):
        schedule.step()
        have.append(layer.router.capacity_factor)
    assert have == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 1.0])


def test_less_capacity_drops_more_tokens():
    layer, x = make(capacity_factor=1.0), torch.randn(60, HIDDEN)
    schedule, loads = CapacitySchedule(layer, 1.0, 0.1, 1), []
    for _ in range(2):
        routing = layer.route(x)
        loads.append((int(routing.tokens_per_expert().max()), int(routing.dropped())))
        schedule.step()
    assert loads[0][0] == 20
    assert loads[1] == (2, 120 - 2 * EXPERTS)


def test_routers_without_capacity_stay_without():
    model = nn.Sequential(make(), make(capacity_factor=1.0))
    CapacitySchedule(model, 2.0, 1.0, 4)
    assert [layer.router.capacity_factor for layer in model] == [None, 2.0]


def test_dropout_hides_experts_in_training_alone():
    layer = make()
    dropout, absent = ExpertDropout(layer, 0.3), []
    for _ in range(200):
        hidden = set(layer.router.dropped.nonzero().flatten().tolist())
        absent.append(len(hidden))
        assert len(hidden) <= EXPERTS - TOP_K
        assert not used(layer.train(), 20) & hidden
        dropout.step()
    # The mean of a binomial distribution, of which more than four do not occur.
    chances = [math.comb(6, n) * 0.3**n * 0.7 ** (6 - n) for n in range(7)]
    want = sum(min(n, 4) * chance for n, chance in enumerate(chances))
    assert sum(absent) / len(absent) == pytest.approx(want, abs=0.25)
    assert used(layer.eval()) == set(range(EXPERTS))
    layer.router.dropped = None
    assert used(layer.train()) == set(range(EXPERTS))


def test_dropout_of_nearly_all_leaves_as_many_as_a_token_needs():
    layer = make()
    ExpertDropout(layer, 0.999)
    assert len(used(layer)) == TOP_K


def test_dropout_leaves_enough_in_each_group_and_of_those_that_warm_up():
    layer = make(num_groups=3, top_groups=2)
    warmup = ExpertWarmup(layer, 3, 10)
    dropout = ExpertDropout(layer, 0.9)
    for _ in range(30):
        warming = (
            torch.zeros(EXPERTS, dtype=torch.bool) if layer.router.unavailable is None else layer.router.unavailable
        )
        routing = layer.route(torch.randn(20, HIDDEN))
        assert (routing.index >= 0).all(), "a token found too few experts"
        assert not (warming | layer.router.dropped)[routing.index].any()
        warmup.step()
        dropout.step()
    assert layer.router.unavailable is None


def test_dropout_goes_by_seed_and_step_alone():
    def masks(dropout, steps):
        found = []
        for _ in range(steps):
            found.append([layer.router.dropped.tolist() for layer in layers])
            dropout.step()
        return found

    layers = nn.ModuleList([make(), make()])
    first = masks(ExpertDropout(layers, 0.4), 8)
    assert any(a != b for a, b in first), "routers of a model must not drop alike"
    assert first != masks(ExpertDropout(layers, 0.4, seed=1), 8)
    half = ExpertDropout(layers, 0.4)
    for _ in range(4):
        half.step()
    layers = nn.ModuleList([make(), make()])
    resumed = ExpertDropout(layers, 0.4)
    resumed.load_state_dict(half.state_dict())
    assert masks(resumed, 4) == first[4:]


@pytest.mark.parametrize("training", [True, False])
def test_warmup_opens_experts(training):
    layer = make().train(training)
    warmup = ExpertWarmup(layer, 2, 8)
    for count in (2, 2, 3, 3, 4, 4, 5, 5, 6, 6):
        assert used(layer) == set(range(count))
        warmup.step()
    assert layer.router.unavailable is None


def test_warmup_opens_experts_evenly_over_groups():
    layer = make(num_groups=3, top_groups=2)
    ExpertWarmup(layer, 3, 8)
    assert used(layer) == {0, 2, 4}


@pytest.mark.parametrize("what", ["capacity", "experts"])
def test_schedules_resume(what):
    def schedule(layer):
        return CapacitySchedule(layer, 3.0, 1.0, 5) if what == "capacity" else ExpertWarmup(layer, 2, 5)

    layers = make(capacity_factor=1.0), make(capacity_factor=1.0)
    first, second = map(schedule, layers)
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    x = torch.randn(30, HIDDEN)
    assert torch.equal(layers[0].route(x).index, layers[1].route(x).index)
    for wrong in ({}, {"steps_done": -1}, {"steps_done": "3"}):
        with pytest.raises(InputError, match="steps_done must be an integer of at least 0"):
            second.load_state_dict(wrong)


def test_another_set_of_closed_experts_compiles_nothing_again():
    layer, x = make(), torch.randn(20, HIDDEN)
    dropout, present = ExpertDropout(layer, 0.5), layer.router.dropped
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), layer(x))
        dropout.step()
    assert counter.frame_count == 1
    assert layer.router.dropped is present, "a CUDA graph goes by the address"


def test_wrong_arguments_of_schedules_are_named():
    layer, limited = make(), make(capacity_factor=1.0)
    with pytest.raises(InputError, match="no router of the model has a capacity"):
        CapacitySchedule(layer, 2, 1, 4)
    for factors in ((0, 1), (1, math.inf)):
        with pytest.raises(InputError, match=r"(start|end) must be a positive number"):
            CapacitySchedule(limited, *factors, 4)
    with pytest.raises(InputError, match="steps must be a positive integer; got 0"):
        CapacitySchedule(limited, 2, 1, 0)
    for probability in (-0.1, 1.0):
        with pytest.raises(InputError, match="probability must be at least 0 and below 1"):
            ExpertDropout(layer, probability)
    for start in (1, 7):
        with pytest.raises(InputError, match=f"start must be between 2 and 6 for TopKRouter.* got {start}"):
            ExpertWarmup(layer, start, 4)


@pytest.mark.parametrize("stages", [4, pytest.param(7, marks=slow)])
def test_capacity_in_stages_stays_within_what_torch_compiles_again(stages):
    layer, x = make(capacity_factor=1.0), torch.randn(10, HIDDEN)
    schedule = CapacitySchedule(layer, 2.0, 1.0, 28, stages=stages)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    seen = []
    for _ in range(30):
        compiled(x)
        seen.append(layer.router.capacity_factor)
        schedule.step()
    each = 28 // stages
    want = [2 - stage / stages for stage in range(stages) for _ in range(each)] + [1.0] * 2
    assert seen == pytest.approx(want)
    # Once more than there are values: after the first change torch tries the factor as a symbol.
    assert counter.frame_count <= stages + 2
    with pytest.raises(InputError, match="stages"):
        CapacitySchedule(layer, 2.0, 1.0, 3, stages=4)
