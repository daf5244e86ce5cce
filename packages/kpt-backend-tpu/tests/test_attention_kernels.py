"""Attention by JAX on the CPU, Pallas interpreted, against the op's reference: values, log-sum-exps and gradients."""

import math

import pytest
import torch

import kpt_core
from kpt_attention import Mask, Plan, causal, dense_mask, document, predicate, sliding_window
from kpt_attention.dense import dense
from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.attention.dense import MOST_DIMS, unsupported
from kpt_core.dispatch import force

pytest.importorskip("jax")

(KERNEL,) = (kernel for kernel in BACKEND.kernels() if kernel.op == "attention.dense")
RANDOM = torch.rand(2, 4, 40, 170, generator=torch.Generator().manual_seed(0))
BITS = predicate(lambda b, h, q, k: ((q * 7 + k * k) % 5 < 3) & (k <= q))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def run(given: dict, *, kernel: bool, wide: bool = False) -> list[torch.Tensor]:
    """Return output, log-sum-exp, and the gradients of a sum of both in what is learned."""
    leaves = {
        name: (value.double() if wide else value).detach().clone().requires_grad_()
        if torch.is_tensor(value) and value.is_floating_point() else value for name, value in given.items()
    }  # fmt: skip
    with force("tpu", KERNEL) if kernel else kpt_core.use("reference", strict=True):
        out, lse = dense(**leaves)
        pulls = [normal(*each.shape, seed=3).to(each.dtype) for each in (out, lse)]
        wanted = [leaf for leaf in leaves.values() if torch.is_tensor(leaf) and leaf.requires_grad]
        # Rows that see nothing have a log-sum-exp of -inf, which nothing may be pulled by.
        total = (out * pulls[0]).sum() + (lse * pulls[1]).masked_fill(lse == -math.inf, 0).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(total, wanted)]


def given_of(mask: Mask | None, queries=40, keys=70, heads=4, kv_heads=2, dims=(24, 40), batch=2, **more) -> dict:
    plan = Plan() if mask is None else mask.plan(queries, keys, batch=batch, heads=heads)
    q, k, v = normal(batch, heads, queries, dims[0]), normal(batch, kv_heads, keys, dims[0], seed=1), None
    v = normal(batch, kv_heads, keys, dims[1], seed=2)
    return {"q": q, "k": k, "v": v, **plan.arguments(queries, keys), **more}


CASES = {
    "everything": given_of(None),
    "causal, past a tile, in groups": given_of(causal(), queries=700, keys=1100, batch=1, heads=2, kv_heads=1),
    "causal, more queries than keys": given_of(causal(), queries=70, keys=40),
    "a step of decoding": given_of(causal(), queries=1, keys=600),
    "window, past a tile": given_of(sliding_window(90), queries=1030, keys=1030, batch=1, heads=1, kv_heads=1),
    "documents of each sequence, softcap": given_of(
        causal() & document(torch.tensor([[0] * 30 + [1] * 40, [0] * 50 + [1] * 20])), softcap=1.5, scale=0.7
    ),
    "sinks": given_of(sliding_window(7), sinks=normal(4)),
    "nothing seen but the sink": given_of(dense_mask(torch.zeros(40, 70, dtype=torch.bool)), sinks=normal(4)),
    "bits of blocks, some dead": given_of(BITS, queries=300, keys=500, batch=1, heads=2, kv_heads=1),
    "bits of each head": given_of(dense_mask(RANDOM < 0.4), keys=170),
    "bits and causality": {**given_of(dense_mask(RANDOM[:1, :1] < 0.4), keys=170), "causal": True, "position": 9},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.bfloat16) for case in ("causal, past a tile, in groups", "sinks", "bits of blocks, some dead")),
    ],
)
def test_attention_and_its_gradients(case, dtype):
    given = {name: value.to(dtype) if name in ("q", "k", "v") else value for name, value in CASES[case].items()}
    coarse = 2e-2 if dtype is torch.bfloat16 else 2e-5
    assert unsupported(dense.bind(**given)) is None
    for got, want in zip(run(given, kernel=True), run(given, kernel=False, wide=True), strict=True):
        largest = want[want.isfinite()].abs().amax().item() if want.isfinite().any() else 0
        torch.testing.assert_close(got.double(), want, rtol=coarse, atol=coarse * largest)


@pytest.mark.parametrize("mask", [sliding_window(9), BITS], ids=["intervals", "blocks"])
def test_what_nobody_sees_and_rows_that_see_nothing_reach_nobody(mask):
    hidden = predicate(lambda b, h, q, k: (k != 11) & (q != 30) & (k != 69))
    plan = (mask & hidden).plan(60, 70)
    if mask is not BITS:  # the same as intervals
        plan = dense_mask((mask & hidden).dense(60, 70)).plan(60, 70)
    given = given_of(None, queries=60) | plan.arguments(60, 70)
    assert (given["intervals"] is None) == (mask is BITS)
    clean = run(given, kernel=True)
    for name in ("k", "v"):
        given[name][:, :, 11] = given[name][:, :, 69] = math.nan
    given["q"][:, :, 20] = math.nan  # at position 30
    got = run(given, kernel=True)
    assert got[1][:, :, 20].eq(-math.inf).all()
    for one, other in zip(got, clean, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_step_of_decoding_is_the_same_program():
    from kpt_backend_tpu import bridge

    given = given_of(causal(), queries=1, keys=64)
    dense.bind(**given)
    with force("tpu", KERNEL):
        dense(**given | {"position": 5})
        before = bridge._bound.cache_info().misses
        out, _ = dense(**given | {"position": 6})
    assert bridge._bound.cache_info().misses == before
    want, _ = dense(**given | {"position": 6})
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_does_not_do_is_refused_in_a_sentence():
    given = given_of(None)
    for change, says in (
        ({"bias": torch.zeros(1, 1, 1, 70)}, "bias is given; this kernel adds nothing to scores"),
        ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes is given"),
        ({"relative_bias": torch.zeros(4, 3)}, "relative_bias is given"),
        ({"dropout": 0.1}, "dropout=0.1; this kernel drops nothing"),
        ({"k": torch.zeros(2, 2, 0, 24), "v": torch.zeros(2, 2, 0, 40)}, "without elements"),
        ({"v": torch.zeros(2, 2, 70, MOST_DIMS + 1)}, "the values' head_dim is 513; this kernel is for 512 at most"),
        ({"q": torch.empty(1, 4, 1, 24).expand(2, 4, 10**5, 24), "k": torch.empty(1).expand(2, 2, 10**5, 24)},
         "a table of 152881 tiles of queries by keys; the 65536 that"),
    ):  # fmt: skip
        call = dense.bind(**given)._replace(**change)
        assert says in str(unsupported(call))
