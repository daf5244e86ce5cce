import math

import pytest
import torch

from kpt_core import InputError, UnknownNameError
from kpt_moe.routers.hash import HASH_SCORES, HashRouter

HIDDEN, EXPERTS, VOCAB = 16, 6, 200


def make(top_k=1, **choices) -> HashRouter:
    return HashRouter(HIDDEN, num_experts=EXPERTS, top_k=top_k, **{"vocab_size": VOCAB, **choices})


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_the_table_holds_distinct_experts_of_each_id(top_k):
    table = make(top_k).table
    assert table.shape == (VOCAB, top_k)
    assert table.dtype is torch.int64
    for row in table.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= expert < EXPERTS for expert in row)


def test_the_token_alone_decides():
    router, ids = make(2), torch.tensor([3, 199, 3, 0])
    routing = router(torch.randn(4, HIDDEN), token_ids=ids)
    assert routing.index.tolist() == [router.table[token].tolist() for token in ids.tolist()]
    assert torch.equal(routing.index[0], routing.index[2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_ids_of_any_integer_type(dtype):
    router, ids = make(), torch.arange(9)
    x = torch.randn(9, HIDDEN)
    assert torch.equal(router(x, token_ids=ids.to(dtype)).index, router(x, token_ids=ids).index)


def test_ids_out_of_range_are_taken_modulo_the_vocabulary():
    router = make()
    index = router(torch.randn(4, HIDDEN), token_ids=torch.tensor([VOCAB, VOCAB + 7, -1, -100])).index
    assert torch.equal(index, router.table[[0, 7, VOCAB - 1, VOCAB - 100]])


@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_count_equally_without_a_gate(top_k):
    routing = make(top_k)(torch.randn(5, HIDDEN), token_ids=torch.arange(5))
    assert torch.equal(routing.weights, torch.full((5, top_k), 1 / top_k))
    assert not routing.logits.any()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", HASH_SCORES)
def test_learned_weights_are_the_definition(score, renormalize):
    router = make(3, learned_weights=True, score=score, renormalize=renormalize, scale=1.5)
    x = torch.randn(11, HIDDEN)
    routing = router(x, token_ids=torch.arange(11))
    logits = x.double() @ router.weight.detach().double().t()
    torch.testing.assert_close(routing.logits.double(), logits, rtol=1e-5, atol=1e-5)
    one = {
        "softmax": lambda value, row: math.exp(value) / sum(math.exp(other) for other in row),
        "sigmoid": lambda value, row: 1 / (1 + math.exp(-value)),
        "sqrtsoftplus": lambda value, row: math.sqrt(math.log1p(math.exp(value))),
    }[score]
    for token, row in enumerate(logits.tolist()):
        chosen = [one(row[expert], row) for expert in router.table[token].tolist()]
        total = sum(chosen) if renormalize else 1
        assert routing.weights[token].tolist() == pytest.approx([1.5 * value / total for value in chosen], rel=1e-5)


def test_scores_that_underflow_leave_finite_gradients():
    router = make(2, learned_weights=True, score="sqrtsoftplus")
    torch.nn.init.constant_(router.weight, -100.0)
    router(torch.ones(3, HIDDEN), token_ids=torch.arange(3)).weights.sum().backward()
    assert router.weight.grad.isfinite().all()


def test_the_seed_decides_the_table():
    torch.manual_seed(1)
    first = make(seed=4).table
    torch.manual_seed(2)
    assert torch.equal(make(seed=4).table, first)
    assert not torch.equal(make(seed=5).table, first)


def test_making_a_table_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_random_table_uses_experts_alike():
    counts = make(2, vocab_size=9000).table.reshape(-1).bincount(minlength=EXPERTS)
    assert counts.min() > 0.9 * 9000 * 2 / EXPERTS


def test_missing_ids_are_asked_for():
    with pytest.raises(InputError, match=r"got token_ids=None, expected integers \[3\]: pass token_ids=input_ids"):
        make()(torch.randn(3, HIDDEN))


def test_unknown_names_offer_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown score 'sigmoids': did you mean 'sigmoid'"):
        make(score="sigmoids")
    with pytest.raises(InputError, match="vocab_size must be a positive integer; got 0"):
        make(vocab_size=0)
