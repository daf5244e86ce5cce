import math

import pytest
import torch

from kpt_core import InputError
from kpt_moe.routers.dynamic_capacity import DynamicCapacityRouter

HIDDEN, EXPERTS, TOP_K = 16, 6, 3


def make(**choices) -> DynamicCapacityRouter:
    return DynamicCapacityRouter(HIDDEN, num_experts=EXPERTS, **{"top_k": TOP_K, **choices})


def distribution(router: DynamicCapacityRouter, token: torch.Tensor) -> list[float]:
    """The probabilities of one token's experts, from the definition."""
    logits = router.weight.detach().double() @ token.double()
    chances = [math.exp(value) for value in logits.tolist()]
    return [chance / sum(chances) for chance in chances]


def complexity(chances: list[float]) -> float:
    return -sum(chance * math.log(chance) for chance in chances) / math.log(EXPERTS)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_is_the_definition(adaptive, renormalize, masked):
    router = make(
        adaptive_top_k=adaptive,
        threshold=0.6 if adaptive else None,
        renormalize=renormalize,
        min_capacity_factor=0.1,
        max_capacity_factor=0.6,
    )
    x = torch.randn(40, HIDDEN)
    mask = torch.arange(40) % 3 != 0 if masked else torch.ones(40, dtype=torch.bool)
    routing = router(x, mask=mask if masked else None)
    chances = [distribution(router, token) for token in x]
    counted = [complexity(row) for row, counts in zip(chances, mask.tolist(), strict=True) if counts]
    factor = 0.1 + 0.5 * sum(counted) / len(counted)
    room = [math.ceil(len(counted) * TOP_K * factor / EXPERTS)] * EXPERTS
    index, weights = [[0] * TOP_K for _ in chances], [[0.0] * TOP_K for _ in chances]
    for choice in range(TOP_K):
        for token, row in enumerate(chances):
            order = sorted(range(EXPERTS), key=lambda expert: -row[expert])[:TOP_K]
            kept = [expert for k, expert in enumerate(order) if not adaptive or sum(row[e] for e in order[:k]) < 0.6]
            if choice >= len(kept):
                index[token][choice] = EXPERTS
            elif not mask[token] or not room[kept[choice]]:
                index[token][choice] = ~kept[choice]
            else:
                room[kept[choice]] -= 1
                index[token][choice] = kept[choice]
                total = sum(row[expert] for expert in kept) if renormalize else 1
                weights[token][choice] = row[kept[choice]] / total
    assert routing.index[mask].tolist() == torch.tensor(index)[mask].tolist()
    torch.testing.assert_close(routing.weights.double(), torch.tensor(weights).double(), rtol=1e-4, atol=1e-5)
    assert routing.dropped() > 0
    assert (routing.index == EXPERTS).any() == adaptive


@pytest.mark.parametrize(("steepness", "factor"), [(0.0, 2.0), (1e4, 0.5)])
def test_capacity_reaches_both_ends(steepness, factor):
    """A flat distribution is as complex as can be, a certain one not at all."""
    router = make(min_capacity_factor=0.5, max_capacity_factor=2.0)
    torch.nn.init.normal_(router.weight, std=1)
    with torch.no_grad():
        router.weight.mul_(steepness)
    scores = router.score(router.gate(torch.randn(20, HIDDEN)))
    capacity = router.capacity(scores, None)
    assert capacity.dtype is torch.int64
    assert capacity == math.ceil(20 * TOP_K * factor / EXPERTS)


@pytest.mark.parametrize("tokens", [10, 100, 1000, 7001])
def test_rounding_makes_no_place(tokens):
    router = make(min_capacity_factor=1.1, max_capacity_factor=1.1)
    scores = torch.full((tokens, EXPERTS), 1 / EXPERTS)
    want = -(-tokens * TOP_K * 11 // (10 * EXPERTS))
    assert router.capacity(scores, None) == want
    assert router.capacity(scores, torch.ones(tokens, dtype=torch.bool)) == want


def test_padding_has_no_say_in_the_capacity():
    router = make(min_capacity_factor=0.5, max_capacity_factor=2.0)
    scores, mask = torch.randn(30, EXPERTS).softmax(-1), torch.arange(30) < 12
    want = router.capacity(scores[:12], None)
    scores[12:] = float("nan")
    assert router.capacity(scores, mask) == want
    assert router.capacity(scores, torch.zeros(30, dtype=torch.bool)) == 0


def test_a_harder_token_takes_more_experts():
    router = make(top_k=EXPERTS, adaptive_top_k=True, threshold=0.9, max_capacity_factor=100, min_capacity_factor=100)
    x = torch.randn(1, HIDDEN)
    kept = [int((router(x * scale).index < EXPERTS).sum()) for scale in (0.01, 0.5, 1, 2, 50)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == EXPERTS
    assert kept[-1] == 1


def test_one_expert_has_no_complexity():
    router = DynamicCapacityRouter(HIDDEN, num_experts=1, top_k=1, min_capacity_factor=0.5)
    assert router(torch.randn(8, HIDDEN)).dropped() == 4


def test_a_replayed_routing_keeps_its_number_of_experts():
    router = make(adaptive_top_k=True)
    x, y = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    recorded = router(x)
    replayed = router(y, replay=recorded)
    assert torch.equal(replayed.index, recorded.index)
    chances = replayed.logits.softmax(-1)
    for token, row in enumerate(recorded.asked().tolist()):
        kept = [chances[token, expert].item() for expert in row if expert < EXPERTS]
        served = [i for i, expert in enumerate(recorded.index[token].tolist()) if 0 <= expert < EXPERTS]
        want = [kept[i] / sum(kept) if i in served else 0 for i in range(TOP_K)]
        assert replayed.weights[token].tolist() == pytest.approx(want, rel=1e-5)


def test_wrong_choices_are_named():
    with pytest.raises(InputError, match=r"at most max_capacity_factor; got 3.0 and 2.0"):
        make(min_capacity_factor=3.0)
    with pytest.raises(InputError, match=r"threshold must be above 0 and at most 1; got 0"):
        make(adaptive_top_k=True, threshold=0)
    with pytest.raises(InputError, match=r"threshold=0.5 has no effect without adaptive_top_k"):
        make(threshold=0.5)


def test_prints_its_choices():
    shown = repr(make(adaptive_top_k=True, max_capacity_factor=1.5))
    assert shown == (
        "DynamicCapacityRouter(16, num_experts=6, top_k=3, max_capacity_factor=1.5, "
        "adaptive_top_k=True, threshold=0.4, renormalize=True)"
    )
