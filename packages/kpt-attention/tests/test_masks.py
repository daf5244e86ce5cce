"""Masks: what they allow, what they lower to, and what they refuse."""

import math
import random
from collections.abc import Callable

import numpy
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
        predicate(lambda b, h, q, k: q // BLOCK >= k // BLOCK),
    ],
    ids=["causality", "an interval", "two intervals", "blocks", "blocks by head", "blocks that are full or dead"],
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


def test_a_tree_stands_behind_a_prefix() -> None:
    mask = tree(torch.tensor([-1, 0, 0, 1]), prefix=3)
    want = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 6]]
    assert [row.nonzero().flatten().tolist() for row in mask.dense(4, 7)[0, 0]] == want
    assert mask.dense(1, 7)[0, 0, 0].nonzero().flatten().tolist() == want[3]
    assert tree(torch.zeros(0, dtype=torch.int64), prefix=2).dense(0, 2).shape == (1, 1, 0, 2)


def test_counts_of_numpy_are_counts() -> None:
    two, four = numpy.int64(2), numpy.int32(4)
    masks = [sliding_window(two), window(two, four), prefix_lm(two), global_tokens(two), dilated(two, two)]
    plain = [sliding_window(2), window(2, 4), prefix_lm(2), global_tokens(2), dilated(2, 2)]
    masks += [natten(two, four, two), block_sparse(torch.eye(4).bool(), two), tree(torch.tensor([-1] * 6), prefix=two)]
    plain += [natten(2, 4, 2), block_sparse(torch.eye(4).bool(), 2), tree(torch.tensor([-1] * 6), prefix=2)]
    for one, other in zip(masks, plain, strict=True):
        assert torch.equal(one.dense(two, numpy.int64(8)), other.dense(2, 8))
        assert one.plan(two, numpy.int64(8)).keys == 8


TWO, ROOT = torch.ones(2, 2), torch.tensor([-1, 0])


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
        (lambda: block_sparse([[True]], 4), r"block_sparse: layout must be a tensor; got list \[\[True\]\]"),
        (lambda: block_sparse(TWO.bool(), True), r"block_sparse: block must be an integer of at least 1; got True"),
        (lambda: block_sparse(TWO.bool(), 4).plan(9), r"the layout has 1 heads and 8 keys; got 1 heads and 9 keys"),
        (lambda: block_sparse(TWO.bool(), 4).plan(9, 8), r"9 queries from position -1 on; expected them from 0 on"),
        (lambda: block_sparse(torch.ones(2, 2, 2).bool(), 4).plan(8, heads=3), r"has 2 heads .*; got 3 heads"),
        (lambda: natten(3, 5, 3).plan(20), r"natten: a picture of 3 by 5 has 15 pixels; got 20 keys"),
        (lambda: natten(3, 5, 3).plan(20, 15), r"natten: 20 queries from position -5 on; expected them from 0 on"),
        (lambda: natten(3, 5.0, 3), r"natten: width must be an integer of at least 1; got 5.0"),
        (lambda: tree(ROOT).plan(4), r"tree: 2 tokens behind 0 keys are 2 keys; got 4"),
        (lambda: tree(ROOT, 3).plan(4, 5), r"tree: 4 queries from position 1 on; expected them from 3 on and before 5"),
        (lambda: tree([-1, 0]), r"tree: parents must be a tensor; got list \[-1, 0\]"),
        (lambda: tree(ROOT.double()), r"tree: parents must be \[tokens\] integers; got torch.float64 \[2\]"),
        (lambda: tree(ROOT, prefix=-1), r"tree: prefix must be an integer of at least 0; got -1"),
        (lambda: document([0, 0, 1]), r"document: ids must be a tensor; got list \[0, 0, 1\]"),
        (lambda: document(cu_seqlens=[0, 2]), r"document: cu_seqlens must be a tensor; got list \[0, 2\]"),
        (lambda: document(cu_seqlens=torch.tensor([0, math.nan])), r"cu_seqlens must rise from 0; got \[0.0, nan\]"),
        (lambda: padding([[1, 0]]), r"padding: attention_mask must be a tensor; got list"),
        (lambda: dense_mask([[True]]), r"dense_mask: mask must be a tensor; got list"),
        (lambda: prefix_lm([3]), r"prefix_lm: length must be an integer of at least 0; got \[3\]"),
        (lambda: prefix_lm(True), r"prefix_lm: length must be an integer of at least 0; got True"),
        (lambda: prefix_lm(torch.tensor([math.nan])), r"length must hold integers of at least 0.*nan"),
        (lambda: dilated(3, True), r"dilated: step must be an integer of at least 1; got True"),
        (lambda: global_tokens("2"), r"global_tokens: count must be an integer of at least 0; got '2'"),
        (lambda: window(math.nan, 2), r"window: left must be an integer of at least 0; got nan"),
        (lambda: predicate(lambda b, h, q, k: q >= k, per_head=1), r"per_head must be True, False, or None .*; got 1"),
        (
            lambda: predicate(lambda b, h, q, k: torch.ones(5).bool()).plan(3),
            r"broadcasts to \[1, 1, 3, 3\]; got \[5\]",
        ),
        (lambda: causal().plan(2.5), r"plan: queries must be an integer of at least 0; got 2.5"),
        (lambda: causal().plan(2, True), r"plan: keys must be an integer of at least 0; got True"),
        (lambda: causal().plan(2, offset=1.0), r"plan: offset must be an integer; got 1.0"),
        (lambda: causal().dense(-1), r"dense: queries must be an integer of at least 0; got -1"),
        (lambda: live_blocks(causal(), 4, 4), r"live_blocks: plan must be a Plan, as mask.plan gives; got Causal"),
        (lambda: live_blocks(causal().plan(4), 4, "4"), r"live_blocks: keys must be an integer of at least 0; got '4'"),
        (
            lambda: live_blocks(causal().plan(4), 4, 4, 0),
            r"live_blocks: block_q must be an integer of at least 1; got 0",
        ),
    ],
)
def test_bad_input_is_a_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
