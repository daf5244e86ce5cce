"""Attention under masks: against dense masked softmax in float64, and what public reports say others got wrong."""

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_attention import (
    Plan,
    attention,
    attention_varlen,
    causal,
    dense_mask,
    flex_attention,
    live_blocks,
    merge,
    packed,
    padding,
    predicate,
    sliding_window,
)
from kpt_attention.plan import allowed_keys, to_block_mask
from kpt_core import InputError
from test_masks import expression

TILES = "kpt_attention.torch_kernels.tiles:forward"


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(q.shape[3])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0)
    return weights @ v.repeat_interleave(groups, 1)


def draw(
    queries: int, keys: int, batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 8, **kind: Any
) -> list[Tensor]:
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    kind = {"dtype": torch.float64, "requires_grad": True, **kind}
    return [torch.randn(batch, number, size, 8, **kind) for number, size in shapes]


@pytest.mark.parametrize("seed", range(40))
def test_any_mask_is_dense_masked_softmax(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    queries = random.choice([1, 5, 130, 257])
    keys = queries + random.choice([0, 3, 130])
    mask = expression(random.randint(0, 3), queries, keys, 2)
    q, k, v = draw(queries, keys)
    seen = mask.dense(queries, keys, batch=2, heads=4)
    with kpt_core.use(TILES):
        out = attention(q, k, v, mask)
    want = softmax_attention(q, k, v, seen)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    pull = torch.randn_like(want)
    for got, expected in zip(
        torch.autograd.grad(out, (q, k, v), pull), torch.autograd.grad(want, (q, k, v), pull), strict=True
    ):
        torch.testing.assert_close(got, expected.nan_to_num(), rtol=0, atol=1e-11)


def test_left_padding_with_nan_reaches_nothing() -> None:
    q, k, v = draw(130, 130, batch=1)
    hidden = torch.arange(130) < 7
    with torch.no_grad():
        for each in (q, k, v):
            each[:, :, hidden] = math.nan
    with kpt_core.use(TILES):
        out = attention(q, k, v, causal() & padding(~hidden[None]))
    pull = torch.randn_like(out).masked_fill(hidden[:, None], math.nan)
    grads = torch.autograd.grad(out, (q, k, v), pull)
    assert not out[:, :, hidden].any()
    assert out.isfinite().all()
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[:, :, hidden].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_repeats_its_bits(dtype: torch.dtype) -> None:
    q, k, v = draw(300, 300, dtype=dtype)
    table = torch.randn(4, 9, requires_grad=True)

    def grads() -> tuple[Tensor, ...]:
        out = attention(q, k, v, sliding_window(40), relative_bias=table, dropout=0.2, seed=3)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v, table))

    assert all(torch.equal(one, other) for one, other in zip(grads(), grads(), strict=True))


def test_indices_past_32768() -> None:  # xformers#719
    q = torch.zeros(1, 1, 33728, 8)
    assert not attention(q, q, q, sliding_window(5)).any()


def test_dead_tiles_of_an_additive_mask() -> None:  # pytorch#127055
    q, k, v = draw(640, 640, batch=1, dtype=torch.float32)
    bias = torch.full((1, 1, 640, 640), -math.inf).masked_fill(sliding_window(10).dense(640), 0.0)
    out = attention(q, k, v, bias=bias)
    torch.testing.assert_close(out, attention(q, k, v, sliding_window(10)))
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_sinks_take_weight_and_have_no_value() -> None:  # transformers#41026
    q, k, v = draw(4, 4, batch=1, heads=3, kv_heads=3)
    sinks = torch.tensor([-5.0, 0.0, 20.0], dtype=torch.float64, requires_grad=True)
    seen = sliding_window(2).dense(4).clone()
    seen[..., 2, :] = False
    out, lse = attention(q, k, v, dense_mask(seen), sinks=sinks, return_lse=True)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~seen, -math.inf)
    every = torch.cat((scores, sinks.view(1, 3, 1, 1).expand(1, 3, 4, 1)), -1)
    torch.testing.assert_close(out, every.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, every.logsumexp(-1))
    assert not out[:, :, 2].any()
    torch.autograd.gradcheck(lambda s: attention(q, k, v, dense_mask(seen), sinks=s), (sinks,))


def test_parts_merge_into_the_whole() -> None:
    q, k, v = draw(50, 300)
    whole, lse = attention(q, k, v, causal(), return_lse=True)
    parts = [
        attention(q, k[:, :, some], v[:, :, some], dense_mask(causal().dense(50, 300)[..., some]), return_lse=True)
        for some in (slice(0, 270), slice(270, 300))
    ]
    out, merged = merge(*parts[0], *parts[1])
    torch.testing.assert_close((out, merged), (whole, lse))
    pull = torch.randn_like(whole), torch.randn_like(lse)
    for got, expected in zip(
        torch.autograd.grad((out, merged), (q, k, v), pull),
        torch.autograd.grad((whole, lse), (q, k, v), pull),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_extra_memory_is_linear() -> None:
    q, k, v = (torch.randn(1, 1, 4096, 16) for _ in range(3))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    from kpt_attention.dense import dense
    from kpt_attention.torch_kernels import tiles

    plan = (causal() & padding(torch.ones(1, 4096).bool())).plan(4096)
    call = dense.bind(q, k, v, **plan.arguments(4096, 4096))._replace(needs=("q", "k", "v"))
    with Watch():
        _, saved = tiles.forward(call)
        tiles.backward(call, saved, torch.ones_like(q), None)
    assert largest <= 128 * 1024  # a tile's scores; all of them are 16.8 million


ENDS = torch.tensor([0, 8, 20])


@pytest.mark.parametrize(
    ("plan", "queries", "keys"),
    [
        (causal().plan(64, 128), 64, 64),  # saw the future
        (causal().plan(1, 10), 1, 11),  # did not see the newest key
        (sliding_window(8).plan(128, 256), 64, 64),
        (sliding_window(8).plan(64, 256), 64, 64),  # gave zeros
        (packed(ENDS).plan(20), 20, 17),
        ((causal() & predicate(lambda b, h, q, k: (q + k) % 3 > 0)).plan(60), 60, 63),  # as many blocks
    ],
)
def test_a_plan_serves_its_own_lengths_alone(plan: Plan, queries: int, keys: int) -> None:
    q, k, v = draw(queries, keys)
    told = f"the plan is for {plan.queries} queries and {plan.keys} keys; got {queries} and {keys}: "
    for moved in (plan, plan.to("cpu")):
        with pytest.raises(InputError, match=told):
            attention(q, k, v, moved)
    with pytest.raises(InputError, match=told):
        flex_attention(q, k, v, lambda s, b, h, i, j: s, plan)
    for function in (live_blocks, to_block_mask):
        with pytest.raises(InputError, match=told):
            function(plan, queries, keys)
    with pytest.raises(InputError, match=f"for {plan.queries} queries and {plan.keys} keys; got those up to"):
        allowed_keys(plan, range(plan.queries or 0), range((plan.keys or 0) + 1), torch.device("cpu"))
    if plan.intervals is not None:
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        with pytest.raises(InputError, match=told):
            attention_varlen(q, k, v, ENDS, mask=plan)


def test_a_plan_of_one_head_serves_no_others_where_heads_differ() -> None:
    q, k, v = draw(8, 8)
    plan = predicate(lambda b, h, q, k: k <= q + h, per_batch=False, per_head=True).plan(8)
    with pytest.raises(InputError, match=r"is for 1 heads, which differ under its mask; got 4: give mask\.plan"):
        attention(q, k, v, plan)


def test_a_growing_plan_serves_each_step_of_decoding() -> None:
    made = []

    def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        made.append(k.numel())
        return (q - k) % 3 < 2

    for mask in (causal(), sliding_window(5), causal() & predicate(allows, per_batch=False, per_head=False)):
        plan = mask.plan(1, 10, growing=True).to("cpu")
        for queries, keys in ((1, 10), (1, 11), (1, 130), (3, 12), (1, 9)):
            q, k, v = draw(queries, keys)
            want = softmax_attention(q, k, v, mask.dense(queries, keys))
            made.clear()
            for _ in range(3):  # as many layers: lowered once
                torch.testing.assert_close(attention(q, k, v, plan), want)
            assert len(made) <= 2
            torch.testing.assert_close(flex_attention(q, k, v, lambda s, b, h, i, j: s, plan), want)
            assert live_blocks(plan, queries, keys).any()
    with pytest.raises(InputError, match="the last query of a growing plan stands at the last key; got offset=0"):
        causal().plan(1, 10, offset=0, growing=True)


@pytest.mark.parametrize("mask", [None, causal(), sliding_window(4)], ids=["within", "causality", "intervals"])
def test_plans_of_other_lengths_compile_into_two_graphs(mask: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for tokens in (16, 20, 33, 64):
        q, k, v = draw(tokens, tokens, dtype=torch.float32)
        got = compiled(q, k, v, causal() if mask is None else mask.plan(tokens))
        torch.testing.assert_close(got, attention(q, k, v, mask or causal()))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(4, 4).bool()}, r"mask must be a Mask or a Plan; got Tensor: kpt_attention.dense_mask"),
        ({"mask": causal().plan(4), "position": 2}, r"position=2, but the plan was made for 0"),
        (
            {"mask": sliding_window(2).plan(5)},
            r"is for 5 queries and 5 keys; got 4 and 4: make one .*plan\(4, 4\)",
        ),
        ({"bias": torch.ones(1, 1, 4, 4).bool()}, r"bias must be floating"),
        ({"bias": [0.0]}, r"attention: bias must be a tensor; got list \[0.0\]"),
        ({"sinks": 1.0}, r"attention: sinks must be a tensor; got float 1.0"),
        ({"q": [1.0]}, r"attention: q must be a tensor; got list"),
        ({"k": None}, r"attention: k must be a tensor; got NoneType"),
        ({"v": 3}, r"attention: v must be a tensor; got int 3"),
        ({"v": torch.ones(4, 8)}, r"q, k and v must be \[batch, heads, tokens, head_dim\]; got"),
        ({"softcap": math.nan}, r"attention: softcap must be a finite number; got nan"),
        ({"softcap": math.inf}, r"attention: softcap must be a finite number; got inf"),
        ({"softcap": -1.0}, r"softcap must be positive, or 0 for none; got -1"),
        ({"scale": math.nan}, r"attention: scale must be a finite number; got nan"),
        ({"scale": "1"}, r"attention: scale must be a finite number; got '1'"),
        ({"scale": True}, r"attention: scale must be a finite number; got True"),
        ({"position": 1.5}, r"attention: position must be an integer; got 1.5"),
        ({"position": True}, r"attention: position must be an integer; got True"),
        ({"dropout": 0.5}, r"attention: dropout=0.5 needs a seed, .* seed=int\(torch.randint\(1 << 62, \(\)\)\)"),
        ({"dropout": math.nan, "seed": 0}, r"attention: dropout must be a finite number; got nan"),
        ({"dropout": 1.0, "seed": 0}, r"dropout must be in \[0, 1\); got 1"),
        ({"dropout": 0.5, "seed": 1.0}, r"attention: seed must be an integer; got 1.0"),
        ({"dropout": 0.5, "seed": torch.ones(2).long()}, r"an int64 tensor \[\]; got torch.int64 \[2\]"),
        ({"dropout": 0.5, "seed": 0, "offset": 0.5}, r"attention: offset must be an integer; got 0.5"),
    ],
)
def test_bad_input_is_a_sentence(change: dict[str, Any], message: str) -> None:
    q, k, v = draw(4, 4)
    with pytest.raises(InputError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})


def test_dropout_draws_from_its_seed_a_number_or_a_tensor() -> None:
    q, k, v = draw(20, 20)
    one = attention(q, k, v, dropout=0.5, seed=numpy.int64(7))
    assert torch.equal(one, attention(q, k, v, dropout=0.5, seed=torch.tensor(7)))
    assert not torch.equal(one, attention(q, k, v, dropout=0.5, seed=8))
    assert torch.equal(attention(q, k, v), attention(q, k, v, seed=torch.tensor(7)))
