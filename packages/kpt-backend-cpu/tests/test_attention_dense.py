"""Native attention: what the suite's cases leave out, threads that share a head, and what is refused."""

import math

import pytest
import torch

import kpt_core
from kpt_core import get_op

NAME = "attention.dense"


def softmax_attention(q, k, v, seen, pull):
    q, k, v = (each.detach().double().requires_grad_() for each in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(q.shape[3])
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    return out, *torch.autograd.grad(out, (q, k, v), pull.double())


# Heads of keys, and groups of queries that read each: fewer than threads, so that several tasks add to one head.
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_that_share_a_head_give_the_right_gradients_and_the_same_bits(heads, window, threads, kernels):
    (kv_heads, groups), generator = heads, torch.Generator().manual_seed(window)
    size = 700
    q, k, v, pull = (
        torch.randn(1, count, size, 24, generator=generator)
        for count in (kv_heads * groups, kv_heads, kv_heads, kv_heads * groups)
    )
    place = torch.arange(size)
    seen = place <= place[:, None]
    options = {"causal": True}
    if window:
        begins = (place - window + 1).clamp(min=0)
        seen &= place >= begins[:, None]
        options["intervals"] = torch.stack((begins, place + 1), -1).int()[None, None, :, None]
    arguments = [each.requires_grad_() for each in (q, k, v)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def results():
        out, _ = get_op(NAME)(*arguments, return_lse=False, **options)
        return out.detach(), *torch.autograd.grad(out, arguments, pull)

    with kpt_core.use("cpu", op=NAME):
        got, again = results(), results()
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    for one, want in zip(got, softmax_attention(q, k, v, seen, pull), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_rows_and_keys_hold_that_see_nothing_and_are_not_seen_reaches_nobody(dtype, trained):
    q, k, v, pull = (torch.randn(1, 2, 150, 8).to(dtype) for _ in range(4))
    for each in (q, k, v, pull):
        each[:, :, :7] = torch.nan
    begins, ends = torch.full((150,), 7), torch.arange(150) + 1
    intervals = torch.stack((begins, ends), -1).int()[None, None, :, None]
    arguments = [each.requires_grad_() for each in (q, k, v)]
    out, lse = trained["dense"](*arguments, intervals)
    grads = torch.autograd.grad(out, arguments, pull)
    assert (lse[:, :, :7] == -torch.inf).all()
    for each in (out, *grads):
        assert each.isfinite().all()
        assert not each[:, :, :7].any()
        assert each[:, :, 8:].any()


def test_without_intervals_nothing_is_seen(kernels):
    x = torch.randn(1, 2, 9, 8)
    out, lse = kernels["dense"](x, x, x, torch.zeros(1, 1, 9, 0, 2, dtype=torch.int32))
    assert not out.any()
    assert (lse == -torch.inf).all()


X = torch.randn(1, 2, 12, 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bias": torch.zeros(1, 1, 12, 12)}, "bias is given; this kernel adds nothing"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is given"),
        ({"relative_bias": torch.zeros(2, 3)}, "relative_bias is given"),
        ({"dropout": 0.5}, "dropout is asked for"),
        ({"v": torch.randn(1, 2, 12, 257)}, "a dim of 257; this kernel takes at most 256"),
        (
            {"q": X[:, :, :2].clone().requires_grad_(), **dict.fromkeys("kv", X.repeat(1, 1, 30, 1))},
            "2 queries of many keys",
        ),
    ],
    ids=["bias", "alibi", "relative bias", "dropout", "dim", "few queries"],
)
def test_it_refuses_in_a_sentence_and_plain_pytorch_serves(options, sentence, kernels):
    call = {"q": X, "k": X, "v": X, **options}
    with kpt_core.use("cpu", op=NAME), pytest.raises(kpt_core.NoKernelError, match=sentence):
        get_op(NAME)(**call)
    assert get_op(NAME)(**call)[0].isfinite().all()
