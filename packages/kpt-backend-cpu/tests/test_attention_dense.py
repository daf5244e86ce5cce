"""Native attention: what the suite's cases leave out, threads that share a head, and what is refused."""

import math
import re
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_backend_cpu import native
from kpt_backend_cpu.attention import dense
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
        ({"bias": torch.zeros(1, 1, 12, 1)}, "a bias that all keys share; this kernel reads one for each"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True), "softcap": 2.0}, "gradients of capped scores"),
        ({"v": torch.randn(1, 2, 12, 257)}, "a dim of 257; this kernel takes at most 256"),
    ],
    ids=["bias", "cap", "dim"],
)
def test_it_refuses_in_a_sentence_and_plain_pytorch_serves(options, sentence, kernels):
    call = {"q": X, "k": X, "v": X, **options}
    with kpt_core.use("cpu", op=NAME), pytest.raises(kpt_core.NoKernelError, match=sentence):
        get_op(NAME)(**call)
    assert get_op(NAME)(**call)[0].isfinite().all()


@pytest.mark.parametrize("batches", [1, 3], ids=["shared", "each"])
def test_the_gradient_of_a_bias_is_made_for_some_sequences_at_a_time(batches, monkeypatch):
    monkeypatch.setattr(dense, "_MOST_PARTS", 2 * 4 * 4 * 2 * 12 * 12)  # of two sequences
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 12, 8, generator=generator) for _ in range(3))
    bias = torch.randn(batches, 2, 12, 12, generator=generator, requires_grad=True)
    grads = []
    for backend in ("cpu", "reference"):
        with kpt_core.use(backend, op=NAME):
            out, lse = get_op(NAME)(q, k, v, bias=bias, dropout=0.4, seed=5)
        grads += torch.autograd.grad(out.square().sum() + lse.sum(), bias)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [-1, 2**63 - 1], ids=["least", "most"])
def test_a_seed_that_was_drawn_is_added_as_int64_adds(seed):
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    given = {"dropout": 0.5, "seed": seed, "drawn_seed": torch.tensor(2**63 - 1 if seed > 0 else -(2**63))}
    results = []
    for backend in ("cpu", "reference"):
        with kpt_core.use(backend, op=NAME):
            results.append(get_op(NAME)(q, k, v, **given)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.fixture
def ran(monkeypatch):
    """The names of the native functions that run."""
    names, run = [], native.run

    def noted(name, *arguments):
        names.append(name)
        run(name, *arguments)

    monkeypatch.setattr(native, "run", noted)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_query_reads_each_key_once_however_few_there_are(dtype, kernels, ran):
    q, k, v = torch.randn(1, 4, 1, 16).to(dtype), *torch.randn(2, 1, 2, 300, 16).to(dtype)
    for keys in range(1, 301):
        with kpt_core.record() as log:
            get_op(NAME)(q, k[:, :, :keys], v[:, :, :keys], return_lse=False, causal=True, position=keys - 1)
        assert log[0].kernel == "kpt_backend_cpu.attention.dense:forward"
    assert ran == ["kpt_attention_paged"] * 300


@pytest.mark.parametrize("keys", [16, 100, 255, 256])
@pytest.mark.parametrize(
    ("queries", "name"), [(2, "kpt_attention_paged"), (15, "kpt_attention_paged"), (16, "kpt_attention_forward")]
)
def test_up_to_15_queries_read_each_key_once(keys, queries, name, kernels, ran):
    q, k, v = torch.randn(2, 6, queries, 16), *torch.randn(2, 2, 3, keys, 16)
    with kpt_core.use("cpu", op=NAME):
        got, lse = get_op(NAME)(q, k, v, causal=True, position=keys - queries)
    assert ran == [name]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=2e-5)
    torch.testing.assert_close(got, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=0, atol=2e-5)


def test_a_few_queries_with_a_gradient_go_through_tiles(kernels, ran):
    q, k, v = torch.randn(2, 6, 3, 16, requires_grad=True), *torch.randn(2, 2, 6, 700, 16)
    get_op(NAME)(q, k, v)[0].sum().backward()
    assert ran == ["kpt_attention_forward", "kpt_attention_backward"]


def test_queries_and_keys_of_any_strides_are_read_where_they_lie(kernels, ran):
    q, k, v = torch.randn(3, 5, 4, 24), *torch.randn(2, 3, 40, 2, 24)  # [batch, tokens, heads, dim]
    q, k, v = (each.transpose(1, 2)[..., :16] for each in (q, k, v))
    got, want = (kernels["dense"](*each)[0] for each in ((q, k, v), [each.contiguous() for each in (q, k, v)]))
    assert torch.equal(got, want)
    assert ran == ["kpt_attention_paged"] * 2


def test_sums_of_many_threads_take_no_more_memory_than_a_part_for_each(kernels):
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("there is no /proc, which tells a process's peak of memory")
    tokens, threads = 4096, 64
    q, k, v = (torch.randn(1, heads, tokens, 64, requires_grad=True) for heads in (8, 2, 2))
    place = torch.arange(tokens)
    intervals = torch.stack((place, place + 1), -1).int()[None, None, :, None]  # little to compute
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with kpt_core.use("cpu", op=NAME):
        out, _ = get_op(NAME)(q, k, v, intervals, return_lse=False)

        def peak():
            return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024

        try:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        except OSError:
            pytest.skip("this system does not let a process forget its peak of memory")
        start = peak()
        torch.autograd.grad(out.sum(), (q, k, v))
        grown = peak() - start
    torch.set_num_threads(before)
    of_a_part = tokens * 2 * 64 * 4 / 2**20
    # Beside the sums: gradients, the threads' own rooms of about 1 MiB, and their stacks. Four parts each took 512 MiB.
    assert grown < threads * of_a_part + 150
