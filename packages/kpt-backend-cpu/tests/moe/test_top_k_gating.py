"""`moe.top_k_gating` against float64: the choice, its weights, the gradient of the logits, and what is refused."""

import pytest
import torch

import kpt_core

CALLS = {
    "softmax": {"top_k": 2},
    "softmax, not renormalised": {"top_k": 3, "renormalize": False, "scale": 2.5},
    "softmax of the chosen": {"top_k": 4, "score": "softmax_after", "renormalize": False},
    "sigmoid": {"top_k": 2, "score": "sigmoid"},
    "sigmoid, biased, in groups": {
        "top_k": 4,
        "score": "sigmoid",
        "scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "biased": True,
    },
    "softmax in groups": {"top_k": 2, "num_groups": 8, "top_groups": 3},
    "all of them": {"top_k": 24},
}


def truth(logits, bias, *, top_k, score="softmax", renormalize=True, scale=1.0, num_groups=1, top_groups=1):
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_after": logits}[score]
    judged = scores.detach() + (0 if bias is None else bias.double())
    groups = judged.unflatten(-1, (num_groups, -1))
    if top_groups < num_groups:
        best = groups.sort(-1, descending=True).values
        of_group = best[..., 0] if bias is None else best[..., :2].sum(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(top_groups).indices, True)
        groups = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf)
    index = groups.flatten(-2).topk(top_k).indices
    weights = scores.gather(1, index)
    if score == "softmax_after":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_choice_weights_and_gradients_are_right(name, dtype, trained):
    options = dict(CALLS[name])
    generator = torch.Generator().manual_seed(len(name))
    # Far enough apart that rounding to float32 changes no choice.
    logits = (torch.rand(17, 24, generator=generator).argsort(-1) / 8 - 1).to(dtype).requires_grad_()
    bias = torch.rand(24, generator=generator) if options.pop("biased", False) else None
    exact = logits.detach().double().requires_grad_()
    want, want_index = truth(exact, bias, **options)
    weights, index = trained["top_k_gating"](logits, bias, **options)
    assert weights.dtype is torch.float32
    assert torch.equal(index, want_index)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)
    pull = torch.linspace(-1, 1, weights.numel()).view_as(weights)
    (grad,) = torch.autograd.grad(weights, logits, pull)
    (want_grad,) = torch.autograd.grad(want, exact, pull.double())
    assert grad.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(grad.double(), want_grad, rtol=tolerance, atol=1e-6)


def test_strides_change_nothing(kernels):
    wide = torch.randn(9, 32)
    for view in (wide[:, ::2], wide[::2, 3:20], wide.t(), wide[:1].expand(4, 32)):
        got, want = (kernels["top_k_gating"](t, top_k=3) for t in (view, view.contiguous()))
        assert all(map(torch.equal, got, want))


def test_no_tokens_give_nothing(kernels):
    weights, index = kernels["top_k_gating"](torch.randn(0, 8), top_k=2)
    assert weights.shape == index.shape == (0, 2)


def test_a_correction_bias_of_float64_is_refused_in_a_sentence(kernels):
    gating = kpt_core.ops()["moe.top_k_gating"]
    with kpt_core.use("cpu"), pytest.raises(kpt_core.NoKernelError, match="correction_bias of float64; needs float32"):
        gating(torch.randn(2, 4), torch.zeros(4, dtype=torch.float64), top_k=1)


def test_it_compiles_as_one_graph(kernels):
    gating, logits = kpt_core.ops()["moe.top_k_gating"], torch.randn(5, 16)
    with torch.no_grad():
        compiled = torch.compile(gating, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, compiled(logits, top_k=3), gating(logits, top_k=3)))
