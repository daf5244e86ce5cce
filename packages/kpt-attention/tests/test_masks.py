"""Masks: what they allow, what they lower to, and what they refuse."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from kpt_attention import (
    Mask,
    attention,
    block_sparse,
    causal,
    dense_mask,
    dilated,
    document,
    everything,
    global_tokens,
    live_blocks,
    natten,
    padding,
    predicate,
    prefix_lm,
    sliding_window,
    tree,
    window,
)
from kpt_attention.plan import BLOCK, allowed_keys, to_block_mask
from kpt_core import InputError


def leaf(queries: int, keys: int, batch: int) -> Mask:
    choices: list[Callable[[], Mask]] = [
        causal,
        lambda: sliding_window(random.randint(1, 200)),
        lambda: window(random.randint(0, 50), random.randint(0, 50)),
        lambda: prefix_lm(random.randint(0, keys)),
        lambda: document(torch.randint(0, 2, (batch, keys)).cumsum(-1) // random.randint(1, 40)),
        lambda: global_tokens(random.randint(0, 9)),
        lambda: dilated(random.randint(1, 9), random.randint(1, 5)),
        lambda: padding(torch.rand(batch, keys) > 0.02),
        lambda: dense_mask(torch.rand(batch, 1, queries, keys) > 0.5),
        lambda: predicate(lambda b, h, q, k: (q * 7 + k * k + h) % 5 < 2, per_head=True),
        lambda: block_sparse(torch.rand(9, 9) > 0.5, 64),
    ]
    return random.choice(choices)()


def expression(depth: int, queries: int, keys: int, batch: int) -> Mask:
    if depth == 0:
        return leaf(queries, keys, batch)
    kind = random.random()
    one = expression(depth - 1, queries, keys, batch)
    if kind < 0.15:
        return ~one
    other = expression(depth - 1, queries, keys, batch)
    return one & other if kind < 0.6 else one | other


def blocks_of(seen: Tensor, value: bool) -> Tensor:
    high, wide = (-size % BLOCK for size in seen.shape[2:])
    padded = torch.nn.functional.pad(seen, (0, wide, 0, high), value=value)
    return padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(3, 4).flatten(4)


@pytest.mark.parametrize("seed", range(60))
def test_any_expression_lowers_exactly(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    queries = random.choice([1, 5, 64, 130, 257])
    keys = queries + random.choice([0, 0, 3, 130])
    batch, heads = random.choice([(1, 1), (2, 3)])
    mask = expression(random.randint(0, 3), queries, keys, batch)
    want = mask.dense(queries, keys, batch=batch, heads=heads).expand(batch, heads, queries, keys)
    plan = mask.plan(queries, keys, batch=batch, heads=heads)
    got = allowed_keys(plan, range(queries), range(keys), torch.device("cpu"))
    assert got is not None
    assert torch.equal(got.expand_as(want), want)
    live = blocks_of(want, False).any(-1)
    full = blocks_of(want, True).all(-1) & live
    states = live_blocks(plan, queries, keys)
    assert torch.equal(states.expand_as(live), live.to(torch.int8) + full.to(torch.int8))


SEEN = {
    "sliding_window": (sliding_window(2), [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]),
    "window": (window(1, 1), [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5]]),
    "prefix_lm": (prefix_lm(3), [[0, 1, 2]] * 3 + [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
    "document": (document(cu_seqlens=torch.tensor([0, 2, 2, 6])), [[0, 1]] * 2 + [[2, 3, 4, 5]] * 4),
    "global_tokens": (global_tokens(1), [[0, 1, 2, 3, 4, 5]] + [[0]] * 5),
    "dilated": (dilated(2, 3), [[0], [1], [2], [0, 3], [1, 4], [2, 5]]),
    "block_sparse": (
        block_sparse(torch.tensor([[True, False], [False, True]]), 4),
        [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2,
    ),
    "natten": (natten(2, 3, 1), [[0], [1], [2], [3], [4], [5]]),
    "natten at an edge": (natten(2, 3, 2), [[0, 1, 3, 4]] * 2 + [[1, 2, 4, 5]] + [[0, 1, 3, 4]] * 2 + [[1, 2, 4, 5]]),
    "tree": (
        tree(torch.tensor([-1, 0, 0, 1, 2, 3])),
        [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]],
    ),
    "padding": (padding(torch.tensor([[0, 1, 1, 1, 0, 1]])), [[1, 2, 3, 5]] * 6),
    "not": (~causal(), [[1, 2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5], [4, 5], [5], []]),
}


@pytest.mark.parametrize("name", SEEN)
def test_each_mask_shows_its_keys(name: str) -> None:
    mask, keys = SEEN[name]
    assert [row.nonzero().flatten().tolist() for row in mask.dense(6)[0, 0]] == keys


def test_plans_are_as_plain_as_the_mask() -> None:
    assert causal().plan(300).arguments(300, 300) == {
        "intervals": None, "blocks": None, "block_bits": None, "causal": True, "position": 0,
    }  # fmt: skip
    assert everything().plan(1, 9).position == 8
    packed = (causal() & document(torch.arange(3).repeat_interleave(100))).plan(300)
    assert packed.intervals is not None
    assert packed.intervals.shape == (1, 1, 300, 1, 2)
    strided = dilated(40, 2).plan(1280)
    assert strided.block_bits is not None
    assert len(strided.block_bits) <= 3  # blocks that are alike share their bits


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        sliding_window(40) & document(torch.arange(300) // 70),
        sliding_window(40) | global_tokens(3),
        natten(15, 20, 5),
        dense_mask(torch.rand(2, 3, 300, 300, generator=torch.Generator().manual_seed(0)) > 0.9),
    ],
    ids=["causality", "an interval", "two intervals", "blocks", "blocks by head"],
)
def test_flex_attention_takes_the_same_blocks(mask: Mask) -> None:
    plan = mask.plan(300, batch=2, heads=3)
    blocks = to_block_mask(plan, 300, 300)
    q, k, v = torch.randn(3, 2, 3, 300, 16).unbind()
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), attention(q, k, v, plan))
    states = live_blocks(plan, 300, 300)
    assert torch.equal(blocks.kv_num_blocks, (states == 1).sum(-1, dtype=torch.int32))
    assert torch.equal(blocks.full_kv_num_blocks, (states == 2).sum(-1, dtype=torch.int32))


def test_a_document_that_comes_back_is_one_document() -> None:
    mask = document(torch.tensor([0, 1, 0]))
    assert mask.dense(3)[0, 0].tolist() == [[True, False, True], [False, True, False], [True, False, True]]
    assert mask.plan(3).intervals is None


def test_a_picture_shows_live_and_partial_cells() -> None:
    assert causal().picture(4) == "█···\n██··\n███·\n████"
    assert causal().picture(4, width=2) == "▒·\n█▒"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_window(0), r"sliding_window: size must be an integer of at least 1; got 0"),
        (lambda: window(-1, 2), r"window: left must be an integer of at least 0; got -1"),
        (lambda: prefix_lm(-3), r"prefix_lm: length must be an integer of at least 0; got -3"),
        (lambda: document(), r"document: give ids or cu_seqlens, one of them"),
        (lambda: document(cu_seqlens=torch.tensor([0, 7, 5])), r"cu_seqlens must rise from 0; got \[0, 7, 5\]"),
        (lambda: document(cu_seqlens=torch.tensor([1, 7])), r"cu_seqlens must rise from 0; got \[1, 7\]"),
        (lambda: document(torch.zeros(3)), r"ids must be .* integers; got torch.float32 \[3\]"),
        (
            lambda: document(torch.zeros(3).long()).plan(4),
            r"ids are \[1, 3\]; expected one for each of 4",
        ),
        (lambda: padding(torch.ones(2, 2, 2).bool()), r"attention_mask must be \[batch, keys\]"),
        (
            lambda: padding(torch.ones(2, 3).bool()).plan(4, batch=2),
            r"\[2, 1, 1, 3\] does not fit; expected \[2",
        ),
        (lambda: dense_mask(torch.ones(3, 3)), r"mask must be bool .*an additive mask of floats is the argument bias"),
        (lambda: natten(2, 3, 3), r"kernel \(3\) must not exceed height \(2\) and width \(3\)"),
        (lambda: tree(torch.tensor([-1, 2, 0])), r"the parent of token 1 is 2; expected -1 or a token before it"),
        (lambda: predicate("q >= k"), r"expected a function of \(b, h, q, k\); got 'q >= k'"),
        (lambda: predicate(lambda b, h, q, k: q - k).plan(3), r"a predicate must give a bool tensor; got torch.int64"),
        (lambda: causal() & torch.ones(3), r"a mask composes with a mask; got Tensor"),
        (lambda: block_sparse(torch.ones(2, 2), 4), r"layout must be .* bool; got torch.float32 \[2, 2\]"),
    ],
)
def test_bad_input_is_a_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
