import math

import pytest
import torch
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError
from kpt_moe.routers.learned import LearnedRouter

HIDDEN, EXPERTS, TOP_K, INNER = 16, 6, 3, 10


def make(**choices) -> LearnedRouter:
    return LearnedRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, **{"inner_size": INNER, **choices})


ACTIVATIONS = {
    "silu": lambda h: h * h.sigmoid(),
    "relu": lambda h: h.clamp(min=0),
    "relu2": lambda h: h.clamp(min=0) ** 2,
    "gelu": lambda h: h * 0.5 * (1 + torch.erf(h / math.sqrt(2))),
    "swiglu": lambda h: h[:INNER] * h[:INNER].sigmoid() * h[INNER:],
}


def expected(router: LearnedRouter, token: torch.Tensor) -> torch.Tensor:
    """Logits of one token, in float64."""
    double = {name: value.detach().double() for name, value in router.named_parameters()}
    hidden = double["inner_weight"] @ token.double() + double.get("inner_bias", 0)
    hidden = ACTIVATIONS[router.activation.name](hidden)
    return double["weight"] @ hidden + double.get("bias", 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_logits_are_the_definition(activation, bias):
    router, x = make(activation=activation, bias=bias), torch.randn(9, HIDDEN)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    want = torch.stack([expected(router, token) for token in x])
    routing = router(x)
    torch.testing.assert_close(routing.logits.double(), want, rtol=1e-4, atol=1e-4)
    best = want.topk(TOP_K).indices
    assert torch.equal(routing.index, best)
    chosen = want.softmax(-1).gather(1, best)
    torch.testing.assert_close(routing.weights.double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_takes_the_choices_of_top_k():
    router = make(score="sigmoid", renormalize=False, scale=2.0, num_groups=3, top_groups=2, correction_bias=True)
    router.correction_bias.copy_(torch.tensor([9.0, 9, 0, 0, 5, 5]))
    routing = router(torch.randn(9, HIDDEN))
    assert set(routing.index.flatten().tolist()) == {0, 1, 4, 5}
    torch.testing.assert_close(routing.weights, 2 * routing.logits.sigmoid().gather(1, routing.index))


def test_is_as_wide_as_a_token_unless_told_otherwise():
    assert make(inner_size=None).inner_weight.shape == (HIDDEN, HIDDEN)
    assert make(inner_size=None, activation="geglu").inner_weight.shape == (2 * HIDDEN, HIDDEN)


def test_decides_what_no_linear_gate_can():
    """The product of two signs."""
    signs = torch.randint(2, (256, 2)) * 2.0 - 1
    target = (signs.prod(-1) > 0).long()
    router = LearnedRouter(2, num_experts=2, top_k=1, inner_size=16, renormalize=False, bias=True)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(router(signs).logits, target).backward()
        optimizer.step()
    assert torch.equal(router(signs).index[:, 0], target)


def test_wrong_choices_are_named():
    with pytest.raises(InputError, match="LearnedRouter: inner_size must be a positive integer; got 0"):
        make(inner_size=0)
    with pytest.raises(UnknownNameError, match="unknown activation 'sillu': did you mean 'silu'"):
        make(activation="sillu")


def test_prints_its_network():
    shown = repr(make(activation="relu", bias=True))
    assert shown.endswith("bias=True, renormalize=True, inner_size=10, activation='relu')")
