"""Packed sequences: equal to each sequence by itself."""

import pytest
import torch

from kpt_attention import (
    attention,
    attention_varlen,
    causal,
    dense_mask,
    everything,
    global_tokens,
    packed,
    predicate,
    prefix_lm,
    sliding_window,
)
from kpt_core import InputError

QUERIES = torch.tensor([0, 0, 5, 5, 19, 30, 31])
#: The same, fewer and more keys than queries, none of either, and one.
KEYS = {"same": QUERIES, "other": torch.tensor([0, 3, 12, 12, 17, 48, 48])}
MASKS = {
    "everything": everything(),
    "causal": causal(),
    "window": sliding_window(4),
    "prefix": prefix_lm(torch.tensor([2])),
    "two intervals": sliding_window(3) | global_tokens(1),
    "blocks": causal() & predicate(lambda b, h, q, k: (q + 2 * k + h) % 3 > 0, per_head=True),
    "not": ~sliding_window(3),
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_are_each_by_itself(mask, keys):
    generator = torch.Generator().manual_seed(0)
    ends, chosen = KEYS[keys], MASKS[mask]
    q = torch.randn(31, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(int(ends[-1]), 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    pull = torch.randn(31, 4, 8, generator=generator, dtype=torch.float64)
    options = {"softcap": 2.0, "sinks": torch.randn(4, generator=generator, dtype=torch.float64)}
    out, lse = attention_varlen(q, k, v, QUERIES, ends, chosen, return_lse=True, **options)
    wanted, sums = [], []
    for n in range(len(QUERIES) - 1):
        own, others = slice(QUERIES[n], QUERIES[n + 1]), slice(ends[n], ends[n + 1])
        rows = (each[part].transpose(0, 1)[None] for each, part in ((q, own), (k, others), (v, others)))
        one, total = attention(*rows, chosen, return_lse=True, **options)
        wanted.append(one[0].transpose(0, 1))
        sums.append(total[0])
    torch.testing.assert_close(out, torch.cat(wanted))
    torch.testing.assert_close(lse, torch.cat(sums, 1))
    got = torch.autograd.grad((out * pull).sum() + lse[lse.isfinite()].sum(), (q, k, v))
    known = torch.cat(sums, 1)
    expected = torch.autograd.grad((torch.cat(wanted) * pull).sum() + known[known.isfinite()].sum(), (q, k, v))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_more_queries_than_keys_the_first_get_zeros_and_no_gradient(dtype):
    q = torch.randn(256, 2, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(3, 2, 16, dtype=dtype, requires_grad=True) for _ in "kv")
    ends, key_ends = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    out = attention_varlen(q, k, v, ends, key_ends, causal())
    last = torch.tensor([75, 109, 255])
    rows = torch.ones(256, dtype=torch.bool)
    rows[last] = False
    assert not out[rows].any()
    torch.testing.assert_close(out[last], v)
    grad, of_values = torch.autograd.grad(out.float().square().sum(), (q, v))
    assert not grad.any()  # of one key each weight is 1
    torch.testing.assert_close(of_values, 2 * v)


def test_it_is_lowered_to_intervals_and_a_plan_serves_many_calls():
    ends = torch.arange(0, 4097, 64)
    plan = packed(ends, mask=causal() & sliding_window(16)).plan(4096)
    assert plan.intervals.shape == (1, 1, 4096, 1, 2)
    q, k, v = torch.randn(3, 4096, 2, 8)
    assert torch.equal(
        attention_varlen(q, k, v, ends, mask=plan), attention_varlen(q, k, v, ends, mask=causal() & sliding_window(16))
    )


def test_a_mask_of_one_size_is_for_sequences_of_that_size():
    seen = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    mask = packed(torch.tensor([0, 3, 6]), mask=dense_mask(seen) | ~everything())
    assert torch.equal(mask.dense(6)[0, 0], torch.block_diag(seen, seen).bool())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, r"packed: cu_seqlens_q must be integers that rise from 0; got \[0"),
        ({"cu_seqlens_q": torch.tensor([0.0, 6])}, "packed: cu_seqlens_q must be integers"),
        ({"cu_seqlens_q": torch.tensor([1, 6])}, "packed: cu_seqlens_q must be integers that rise from 0"),
        ({"cu_seqlens_k": torch.tensor([0, 6])}, "cu_seqlens_q has 2 sequences and cu_seqlens_k 1"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "end at 5 queries and 5 keys; got 6 and 6"),
        ({"q": torch.ones(1, 6, 2, 4)}, r"must be \[tokens, heads, head_dim\]; got \[1, 6, 2, 4\]"),
        ({"mask": dense_mask(torch.ones(2, 2, dtype=torch.bool))}, r"a mask of shape \[1, 1, 2, 2\] does not fit"),
        (
            {"cu_seqlens_k": torch.tensor([0, 1, 6]), "alibi_slopes": torch.ones(2)},
            "alibi_slopes needs keys that end where queries do",
        ),
        ({"cu_seqlens_q": [0, 2, 6]}, r"attention_varlen: cu_seqlens_q must be a tensor; got list \[0, 2, 6\]"),
        ({"cu_seqlens_k": [0, 2, 6]}, r"attention_varlen: cu_seqlens_k must be a tensor; got list \[0, 2, 6\]"),
        ({"q": [1.0]}, r"attention_varlen: q must be a tensor; got list \[1.0\]"),
        ({"v": torch.ones(6, 1, 4)}, "k and v as many heads and tokens; got"),
        ({"k": torch.ones(6, 2, 5)}, "q and k must have one head_dim"),
        ({"mask": torch.ones(2, 2).bool()}, "packed: mask must be a Mask or None; got Tensor"),
        ({"dropout": 0.5}, "dropout=0.5 needs a seed"),
        ({"softcap": float("nan")}, "softcap must be a finite number; got nan"),
    ],
)
def test_wrong_input_is_a_sentence(change, message):
    given = dict.fromkeys("qkv", torch.ones(6, 2, 4)) | {"cu_seqlens_q": torch.tensor([0, 2, 6])} | change
    with pytest.raises(InputError, match=message):
        attention_varlen(**given)
