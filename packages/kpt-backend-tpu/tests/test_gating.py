"""Gating by JAX on the CPU against the op's reference: ids, weights and the gradient of the logits."""

import pytest
import torch

import kpt_core
from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.moe.gating import unsupported
from kpt_core.dispatch import force
from kpt_moe.top_k_gating import top_k_gating

pytest.importorskip("jax")

(KERNEL,) = (kernel for kernel in BACKEND.kernels() if kernel.op == "moe.top_k_gating")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "biased", "options"),
    [
        (16, False, {"top_k": 4}),
        (16, False, {"top_k": 1, "score": "sigmoid", "renormalize": False, "scale": 2.5}),
        (70, False, {"top_k": 3, "score": "softmax_after", "renormalize": False}),
        (384, True, {"top_k": 8, "score": "sigmoid"}),
        (32, True, {"top_k": 6, "score": "sigmoid", "num_groups": 8, "top_groups": 3}),
        (40, False, {"top_k": 2, "num_groups": 5, "top_groups": 2}),
        (8, True, {"top_k": 2, "num_groups": 8, "top_groups": 3}),
    ],
)
def test_equals_the_reference(experts, biased, options, dtype):
    torch.manual_seed(0)
    # Of distinct numbers, since which of equal ones is chosen is not specified.
    logits = (torch.stack([torch.randperm(experts) for _ in range(77)]) / experts * 4).to(dtype)
    bias = torch.linspace(0, 0.3, experts)[torch.randperm(experts)] if biased else None
    pull = torch.randn(77, options["top_k"])
    results = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        with force("tpu", KERNEL) if ours else kpt_core.use("reference", strict=True):
            weights, index = top_k_gating(leaf, bias, **options)
        results.append((index.sort(-1).values, weights, *torch.autograd.grad(weights, leaf, pull)))
    (index, *got), (wanted, *want) = results
    assert torch.equal(index, wanted)
    for one, other in zip(got, want, strict=True):
        coarse = 2e-5 if one.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(one, other, rtol=coarse, atol=coarse)


def test_what_is_not_a_number_is_chosen_first_and_stays_in_its_row():
    logits = torch.randn(9, 16)
    plain = top_k_gating(logits, top_k=2)
    logits[4, 7] = torch.nan
    with force("tpu", KERNEL):
        weights, index = top_k_gating(logits, top_k=2, score="sigmoid", renormalize=False)
    assert index[4, 0] == 7
    assert weights[4].isnan().tolist() == [True, False]
    assert torch.equal(index[[0, 1, 2, 3, 5, 6, 7, 8]], plain[1][[0, 1, 2, 3, 5, 6, 7, 8]])


def test_a_group_of_nan_and_minus_infinity_does_not_let_the_others_in():
    logits = torch.tensor([[9.0, -9, -9, -9, -torch.inf, torch.nan, -torch.inf, -torch.inf, 5, 4, 0, 0]])
    how = {"top_k": 2, "score": "softmax_after", "num_groups": 3, "top_groups": 2}
    with force("tpu", KERNEL):
        _, index = top_k_gating(logits, torch.zeros(12), **how)
    with kpt_core.use("reference", strict=True):
        assert torch.equal(index, top_k_gating(logits, torch.zeros(12), **how)[1])
    assert index.tolist() == [[5, 8]]


def test_what_the_kernel_does_not_do_is_refused_in_a_sentence():
    call = top_k_gating.bind(torch.randn(4, 64), top_k=2)
    assert unsupported(call) is None
    for change, says in (
        ({"logits": torch.randn(4, 2000)}, "2000 experts; this kernel is for 1024 at most"),
        ({"top_k": 40}, "40 choices; this kernel is for 32"),
        ({"num_groups": 32}, "32 groups; this kernel is for 16"),
        ({"correction_bias": torch.zeros(64).double()}, "a correction bias in torch.float64"),
        ({"logits": torch.randn(0, 64)}, "no tokens"),
    ):
        assert says in str(unsupported(call._replace(**change)))
