"""The op `moe.top_k_gating` against its definition, token by token, and its place in `TopKRouter`."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from kpt_core import InputError
from kpt_moe import TopKRouter
from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.routers import top_k as of_router
from kpt_moe.top_k_gating import SCORES, top_k_gating

TOKENS, EXPERTS, TOP_K = 20, 12, 3
GROUPS = [(1, 1), (4, 2), (12, 5), (2, 2)]


def of_token(
    row: list[float], bias: list[float] | None, top_k: int, score: str, renormalize: bool, scale: float, groups: int,
    top_groups: int,
) -> tuple[list[float], list[int]]:  # fmt: skip
    """Weights and ids of one token, in Python's numbers."""
    raised = [math.exp(value - max(row)) for value in row]
    scores = {
        "softmax": [value / sum(raised) for value in raised],
        "softmax_after": row,
        "sigmoid": [1 / (1 + math.exp(-value)) for value in row],
    }[score]
    judged = [value + (bias[expert] if bias else 0) for expert, value in enumerate(scores)]
    size = len(row) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    taken = 2 if bias else 1
    best = [sum(sorted((judged[expert] for expert in group), reverse=True)[:taken]) for group in members]
    kept = sorted(range(groups), key=lambda group: -best[group])[:top_groups]
    inside = [expert for group in kept for expert in members[group]]
    chosen = sorted(inside, key=lambda expert: -judged[expert])[:top_k]
    weights = [scores[expert] for expert in chosen]
    if score == "softmax_after":
        weights = [math.exp(value) for value in weights]
    if renormalize or score == "softmax_after":
        weights = [value / sum(weights) for value in weights]
    return [value * scale for value in weights], chosen


def make_bias(biased: bool) -> Tensor | None:
    return torch.randn(EXPERTS) if biased else None


@pytest.mark.parametrize(("groups", "top_groups"), GROUPS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_is_the_definition(score, renormalize, biased, groups, top_groups):
    logits, bias = torch.randn(TOKENS, EXPERTS, dtype=torch.float64), make_bias(biased)
    settings = {"score": score, "renormalize": renormalize, "scale": 2.5}
    weights, index = top_k_gating(logits, bias, top_k=TOP_K, num_groups=groups, top_groups=top_groups, **settings)
    for token, row in enumerate(logits.tolist()):
        want, chosen = of_token(row, None if bias is None else bias.tolist(), TOP_K, groups=groups,
                                top_groups=top_groups, **settings)  # fmt: skip
        assert index[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("score", SCORES)
def test_computes_in_float32_whatever_the_logits_are(score, dtype):
    logits = torch.randn(TOKENS, EXPERTS).to(dtype)
    have, want = (top_k_gating(x, top_k=TOP_K, score=score) for x in (logits, logits.float()))
    assert have[0].dtype is torch.float32
    assert have[1].dtype is torch.int64
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gradient(score, renormalize, biased):
    logits = torch.randn(5, EXPERTS, dtype=torch.float64, requires_grad=True)
    bias = make_bias(biased)

    def weights(x: Tensor) -> Tensor:
        return top_k_gating(x, bias, top_k=TOP_K, score=score, renormalize=renormalize, num_groups=3, top_groups=2)[0]

    assert gradcheck(weights, (logits,))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic):
    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        return top_k_gating(logits, top_k=TOP_K, score="sigmoid", num_groups=4, top_groups=2)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (8, 9):
        logits = torch.randn(tokens, EXPERTS, requires_grad=True)
        (have, index), (want, wanted) = compiled(logits), run(logits)
        assert torch.equal(index, wanted)
        torch.testing.assert_close(have, want)
        grads = (torch.autograd.grad(weights.square().sum(), logits) for weights in (have, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("top_k", [0, -1, True])
def test_top_k_must_be_a_positive_integer(top_k):
    with pytest.raises(InputError, match=rf"moe\.top_k_gating: top_k must be a positive integer; got {top_k}"):
        top_k_gating(torch.zeros(2, 4), top_k=top_k)


# The router.

ROUTERS = {
    "plain": {},
    "softmax_after": {"score": "softmax_after", "bias": True},
    "groups": {"score": "sigmoid", "correction_bias": True, "num_groups": 4, "top_groups": 2, "scale": 2.5},
}


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """The logits of every call of the op by a router."""
    seen = []

    def record(logits: Tensor, *args, **kwargs):
        seen.append(logits)
        return top_k_gating(logits, *args, **kwargs)

    monkeypatch.setattr(of_router, "top_k_gating", record)
    return seen


def make_router(**choices) -> TopKRouter:
    router = TopKRouter(16, num_experts=EXPERTS, top_k=TOP_K, **choices)
    if router.correction_bias is not None:
        router.correction_bias.normal_()
    return router


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("choices", ROUTERS.values(), ids=ROUTERS)
def test_a_router_calls_it_and_gives_the_bits_of_its_own_steps(choices, dtype, calls):
    router, x = make_router(**choices).to(dtype), torch.randn(TOKENS, 16, dtype=dtype)
    x.requires_grad_()
    by_op = router(x)
    assert len(calls) == 1
    # With a mask the steps are taken one by one; this one masks nothing.
    by_steps = router(x, mask=torch.ones(TOKENS, dtype=torch.bool))
    assert len(calls) == 1
    for name in ("index", "weights", "logits"):
        assert torch.equal(getattr(by_op, name), getattr(by_steps, name))
    grad = torch.randn_like(by_op.weights)
    wanted = [x, *router.parameters()]
    have, want = (torch.autograd.grad(routing.weights, wanted, grad) for routing in (by_op, by_steps))
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


class OwnChoice(TopKRouter):
    def choose(self, logits, scores, mask, token_ids):
        return super().choose(-logits, -scores, mask, token_ids)


class OwnWeights(TopKRouter):
    def weigh(self, scores, index):
        return super().weigh(scores, index) * 3


class OwnScores(TopKRouter):
    def score(self, logits):
        return super().score(-logits)


@pytest.mark.parametrize("kind", [OwnChoice, OwnWeights, OwnScores])
def test_a_subclass_keeps_its_own_steps(kind, calls):
    router, x = kind(16, num_experts=EXPERTS, top_k=TOP_K), torch.randn(TOKENS, 16)
    plain = TopKRouter(16, num_experts=EXPERTS, top_k=TOP_K)
    plain.load_state_dict(router.state_dict())
    have, want = router(x), plain(x)
    assert len(calls) == 1, "that of the plain one"
    assert not (torch.equal(have.index, want.index) and torch.equal(have.weights, want.weights))


def _closed(router: TopKRouter) -> None:
    router.unavailable = torch.arange(EXPERTS) < 2


STEPS = {
    "capacity": lambda router: setattr(router, "capacity_factor", 0.5),
    "jitter": lambda router: setattr(router, "jitter", 0.5),
    "closed experts": _closed,
}


@pytest.mark.parametrize("change", STEPS.values(), ids=STEPS)
def test_what_comes_between_the_steps_is_not_left_out(change, calls):
    router, x = make_router(), torch.randn(TOKENS, 16)
    plain = router(x)
    assert len(calls) == 1
    change(router)
    changed = router(x)
    assert len(calls) == 1
    assert not torch.equal(plain.index, changed.index)


def test_a_replayed_choice_is_taken(calls):
    router, x = make_router(), torch.randn(TOKENS, 16)
    replay = make_router()(x)
    calls.clear()
    assert torch.equal(router(x, replay=replay).index, replay.index)
    assert not calls


def test_batch_invariance_keeps_its_own_steps(calls):
    router, x = make_router(), torch.randn(TOKENS, 16)
    with batch_invariant():
        assert torch.equal(router(x).weights[3:4], router(x[3:4]).weights)
    assert not calls
