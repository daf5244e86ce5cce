import math

import pytest
import torch

from kpt_core import InputError
from kpt_moe.routers.switch import SwitchRouter

HIDDEN, EXPERTS = 16, 5


def make(**choices) -> SwitchRouter:
    return SwitchRouter(HIDDEN, num_experts=EXPERTS, **choices)


def test_defaults_are_those_of_the_paper():
    router = make()
    assert (router.top_k, router.capacity_factor, router.eval_capacity_factor, router.jitter) == (1, 1.25, 2.0, 0.01)
    assert router.priority == "position"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_is_the_definition(training, bias):
    router, x = make(jitter=0, bias=bias).train(training), torch.randn(41, HIDDEN)
    if bias:
        torch.nn.init.normal_(router.bias)
    routing = router(x)
    room = [math.ceil(41 / EXPERTS * (1.25 if training else 2.0))] * EXPERTS
    logits = x.double() @ router.weight.detach().double().t() + (router.bias.detach().double() if bias else 0)
    for token, row in enumerate(logits.softmax(-1).tolist()):
        best = max(range(EXPERTS), key=lambda expert: row[expert])
        if room[best]:
            room[best] -= 1
            assert routing.index[token].item() == best
            assert routing.weights[token].item() == pytest.approx(row[best], rel=1e-5)
        else:
            assert routing.index[token].item() == ~best
            assert routing.weights[token].item() == 0


def test_a_full_expert_refuses_later_tokens_in_training_more_than_outside():
    router, x = make(jitter=0), torch.ones(40, HIDDEN)
    assert router(x).dropped() == 40 - 10
    assert router.eval()(x).dropped() == 40 - 16


def test_priority_by_weight_keeps_the_most_certain_tokens():
    router, x = make(jitter=0, priority="weight", capacity_factor=0.5), torch.randn(50, HIDDEN)
    routing = router(x)
    chances = routing.logits.softmax(-1).amax(-1)
    for expert in range(EXPERTS):
        served, refused = chances[routing.index[:, 0] == expert], chances[routing.index[:, 0] == ~expert]
        assert len(served) <= 5
        if len(refused):
            assert served.min() >= refused.max()


def test_no_factor_is_no_limit():
    routing = make(capacity_factor=None, eval_capacity_factor=None)(torch.ones(40, HIDDEN))
    assert routing.dropped() == 0


def test_the_weight_teaches_the_gate():
    router = make()
    router(torch.randn(9, HIDDEN)).weights.sum().backward()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("choice", "value"), [("jitter", 1.0), ("capacity_factor", 0.0), ("eval_capacity_factor", -1)])
def test_wrong_numbers_are_named(choice, value):
    with pytest.raises(InputError, match=f"SwitchRouter: {choice} must be .*; got {value}"):
        make(**{choice: value})
