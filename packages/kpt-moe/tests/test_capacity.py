import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, UnknownNameError
from kpt_moe.capacity import PRIORITIES, expert_capacity, limit_capacity

EXPERTS = 4


@st.composite
def choices(draw):
    """Ids of every sort, weights without ties among those that matter, and the places of each expert."""
    tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    ids = st.integers(-EXPERTS, EXPERTS + 2)
    index = draw(st.lists(st.lists(ids, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens))
    order = draw(st.permutations(range(tokens * top_k)))
    places = draw(st.lists(st.integers(0, 8), min_size=EXPERTS, max_size=EXPERTS))
    weights = torch.tensor(order, dtype=torch.float32).view(tokens, top_k) / 40
    return torch.tensor(index, dtype=torch.int64).view(tokens, top_k), weights, places


def expected(index, weights, places, priority) -> list[list[int]]:
    """Choice by choice, in the order in which they are served."""
    tokens, top_k = index.shape
    turns = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    if priority == "weight":
        turns = sorted(turns, key=lambda turn: -weights[turn].item())
    kept, left = index.tolist(), list(places)
    for token, choice in turns:
        expert = kept[token][choice]
        if 0 <= expert < EXPERTS:
            if left[expert]:
                left[expert] -= 1
            else:
                kept[token][choice] = ~expert
    return kept


@given(choices(), st.sampled_from(PRIORITIES))
def test_serves_choice_by_choice(drawn, priority):
    index, weights, places = drawn
    kept = limit_capacity(index, weights, num_experts=EXPERTS, capacity=torch.tensor(places), priority=priority)
    assert kept.tolist() == expected(index, weights, places, priority)
    assert kept.shape == index.shape
    assert kept.dtype is torch.int64


@given(choices(), st.sampled_from(PRIORITIES), st.integers(0, 8))
def test_capacity_is_a_number_or_a_tensor(drawn, priority, capacity):
    index, weights, _ = drawn
    want = expected(index, weights, [capacity] * EXPERTS, priority)
    for same in (capacity, torch.tensor(capacity), torch.full((EXPERTS,), capacity)):
        assert limit_capacity(index, weights, num_experts=EXPERTS, capacity=same, priority=priority).tolist() == want


@given(choices(), st.sampled_from(PRIORITIES))
def test_never_exceeds_the_capacity_nor_refuses_while_there_is_room(drawn, priority):
    index, weights, places = drawn
    kept = limit_capacity(index, weights, num_experts=EXPERTS, capacity=torch.tensor(places), priority=priority)
    for expert, most in enumerate(places):
        asked = int((index == expert).sum())
        assert int((kept == expert).sum()) == min(asked, most)
    untouched = (index < 0) | (index >= EXPERTS)
    assert torch.equal(kept[untouched], index[untouched])


@given(choices())
def test_the_refused_come_after_the_served(drawn):
    index, weights, places = drawn
    kept = limit_capacity(index, weights, num_experts=EXPERTS, capacity=torch.tensor(places), priority="weight")
    for expert in range(EXPERTS):
        served, refused = weights[(index == expert) & (kept == expert)], weights[(index == expert) & (kept != expert)]
        if len(served) and len(refused):
            assert served.min() > refused.max()


def test_equal_weights_are_served_by_position_in_the_tensor():
    index = torch.tensor([[0, 1], [1, 0], [0, 1]])
    kept = limit_capacity(index, torch.ones(3, 2), num_experts=2, capacity=2, priority="weight")
    assert kept.tolist() == [[0, 1], [1, 0], [~0, ~1]]


def test_unknown_priority_is_named():
    with pytest.raises(UnknownNameError, match="unknown priority 'weights': did you mean 'weight'"):
        limit_capacity(
            torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), num_experts=1, capacity=1, priority="weights"
        )  # type: ignore[arg-type]


# Decimals as people write them, and ratios such as 4 / 3.
factors = st.one_of(
    st.integers(1, 400).map(lambda hundredths: Fraction(hundredths, 100)),
    st.builds(Fraction, st.integers(1, 20), st.integers(1, 20)),
)


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 256), factors)
def test_expert_capacity_is_the_formula_without_rounding_errors(tokens, top_k, experts, factor):
    want = math.ceil(tokens * top_k * factor / experts)
    assert expert_capacity(tokens, top_k=top_k, num_experts=experts, factor=float(factor)) == want
    assert expert_capacity(torch.tensor(tokens), top_k=top_k, num_experts=experts, factor=float(factor)).item() == want


def test_the_least_factor_still_gives_a_place():
    assert expert_capacity(5, top_k=1, num_experts=4, factor=1e-12) == 1


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_factor_must_be_a_positive_number(factor):
    with pytest.raises(InputError, match="factor must be a positive number; got"):
        expert_capacity(8, top_k=1, num_experts=4, factor=factor)
