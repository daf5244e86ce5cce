import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from kpt_core import InputError, UnknownNameError
from kpt_moe import Routing, TopKRouter
from kpt_moe.routers import SCORES

HIDDEN, EXPERTS, TOP_K = 16, 6, 3


def make(**choices) -> TopKRouter:
    torch.manual_seed(0)
    return TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, **choices)


def parts(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return routing.index, routing.weights, routing.logits


def expected(router: TopKRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token by token, from the definitions."""
    logits = x.double() @ router.weight.detach().double().t()
    if router.bias is not None:
        logits = logits + router.bias.detach().double()
    indices, weights = [], []
    for row in logits.tolist():
        if router.score_function == "sigmoid":
            scores = [1 / (1 + 2.718281828459045**-value) for value in row]
        else:
            scores = torch.tensor(row, dtype=torch.float64).softmax(0).tolist()
        best = sorted(range(EXPERTS), key=lambda expert: -scores[expert])[:TOP_K]
        chosen = [scores[expert] for expert in best]
        if router.renormalize or router.score_function == "softmax_after":
            chosen = [value / sum(chosen) for value in chosen]
        indices.append(best)
        weights.append(chosen)
    return torch.tensor(indices), torch.tensor(weights), logits


def _renormalising(score: str, renormalize: bool) -> dict[str, bool]:
    return {} if score == "softmax_after" else {"renormalize": renormalize}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_is_the_definition(score, renormalize, bias):
    router = make(score=score, bias=bias, **_renormalising(score, renormalize))
    if router.bias is not None:
        torch.nn.init.normal_(router.bias)
    x = torch.randn(40, HIDDEN)
    routing = router(x)
    index, weights, logits = expected(router, x)
    assert isinstance(routing, Routing)
    assert torch.equal(routing.index, index)
    torch.testing.assert_close(routing.weights, weights.float())
    torch.testing.assert_close(routing.logits, logits.float(), rtol=1e-5, atol=1e-5)


def test_softmax_after_equals_renormalised_softmax():
    x = torch.randn(40, HIDDEN)
    before, after = make(score="softmax")(x), make(score="softmax_after")(x)
    assert torch.equal(before.index, after.index)
    torch.testing.assert_close(before.weights, after.weights)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_those_of_the_definition(score, renormalize):
    router, x = make(score=score, **_renormalising(score, renormalize)), torch.randn(7, HIDDEN, requires_grad=True)
    routing = router(x)
    index, weights = routing.index, routing.weights
    logits = x.double() @ router.weight.double().t()
    chosen = (logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)).gather(1, index)
    if renormalize or score == "softmax_after":
        chosen = chosen / chosen.sum(-1, keepdim=True)
    grad = torch.randn(7, TOP_K)
    have = torch.autograd.grad(weights, (x, router.weight), grad)
    want = torch.autograd.grad(chosen, (x, router.weight), grad.double())
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)


def test_logits_carry_gradients():
    router = make()
    router(torch.randn(5, HIDDEN)).logits.logsumexp(-1).sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_float32_whatever_the_model_is(dtype):
    low = make(dtype=dtype, bias=True)
    high = make(bias=True)
    high.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    x = torch.randn(200, HIDDEN).to(dtype)
    for want, have in zip(parts(high(x.float())), parts(low(x)), strict=True):
        assert have.dtype is want.dtype
        assert torch.equal(have, want)
    assert low(x).index.dtype is torch.int64
    assert low(x).weights.dtype is low(x).logits.dtype is torch.float32


def test_autocast_does_not_change_the_routing():
    router, x = make(), torch.randn(200, HIDDEN)
    want = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = router(x)
        assert torch.mm(x, x.t()).dtype is torch.bfloat16, "autocast must go on afterwards"
    assert all(torch.equal(a, b) for a, b in zip(parts(want), parts(have), strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_any_number_of_tokens(tokens):
    routing = make()(torch.randn(tokens, HIDDEN))
    assert routing.index.shape == routing.weights.shape == (tokens, TOP_K)
    assert routing.logits.shape == (tokens, EXPERTS)
    assert all(len(set(row)) == TOP_K for row in routing.index.tolist())


def test_top_k_may_be_all_experts():
    routing = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=EXPERTS)(torch.randn(4, HIDDEN))
    assert (routing.index.sort(-1).values == torch.arange(EXPERTS)).all()


def test_initial_logits_of_normalised_tokens_have_unit_variance():
    torch.manual_seed(0)
    router = TopKRouter(256, num_experts=64, top_k=2)
    x = F.rms_norm(torch.randn(512, 256), (256,))
    assert router(x).logits.std().item() == pytest.approx(1, abs=0.05)


def test_device_and_dtype_are_taken_at_construction():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, device="meta", dtype=torch.bfloat16, bias=True)
    assert all(p.device.type == "meta" and p.dtype is torch.bfloat16 for p in router.parameters())
    routing = router(torch.empty(7, HIDDEN, device="meta", dtype=torch.bfloat16))
    assert routing.index.shape == (7, TOP_K)
    assert all(part.device.type == "meta" for part in parts(routing))


def test_compiles_without_a_break():
    router, x = make(), torch.randn(9, HIDDEN)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for want, have in zip(parts(router(x)), parts(compiled(x)), strict=True):
        torch.testing.assert_close(have, want)


def test_scores_that_all_underflow_give_no_weights():
    router = make(score="sigmoid", bias=True)
    torch.nn.init.zeros_(router.weight)
    torch.nn.init.constant_(router.bias, -120.0)
    weights = router(torch.randn(4, HIDDEN)).weights
    assert torch.equal(weights, torch.zeros_like(weights))
    weights.sum().backward()
    assert router.weight.grad.isfinite().all()


def test_is_a_tree_of_tensors():
    routing = make()(torch.randn(4, HIDDEN))
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), routing)
    assert isinstance(moved, Routing)
    assert all(part.device.type == "meta" for part in parts(moved))


def test_prints_its_choices():
    shown = repr(make(score="sigmoid", renormalize=False))
    assert shown == "TopKRouter(16, num_experts=6, top_k=3, score='sigmoid', renormalize=False)"


@pytest.mark.parametrize("top_k", [0, -1, EXPERTS + 1])
def test_top_k_must_fit(top_k):
    with pytest.raises(
        InputError, match=rf"top_k (must be a positive integer; got {top_k}|\(7\) must not exceed num_experts \(6\))"
    ):
        TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=top_k)


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_after_is_normalised_whatever_is_asked(renormalize):
    with pytest.raises(InputError, match=rf"renormalize={renormalize} has no effect with score='softmax_after'"):
        make(score="softmax_after", renormalize=renormalize)


def test_unknown_score_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown score 'sigmoids': did you mean 'sigmoid'"):
        make(score="sigmoids")


@pytest.mark.parametrize("shape", [(2, 3, HIDDEN), (HIDDEN,), (3, HIDDEN + 1)])
def test_wrong_shapes_are_named(shape):
    with pytest.raises(InputError, match=r"x must be \[tokens, 16\]; got \["):
        make()(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_correction_bias_keeps_its_bits_whatever_the_model_becomes(dtype):
    router = make(correction_bias=True)
    bias = router.correction_bias.uniform_(-1, 1).clone()
    assert torch.equal(router.to(dtype).correction_bias, bias)
    assert router.to("meta").correction_bias.dtype is torch.float32


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_low_precision_saves_no_wide_copy_of_its_tokens(bias, masked):
    router, x = make(bias=bias).bfloat16(), torch.randn(40, HIDDEN).bfloat16().requires_grad_()
    mask = torch.arange(40) % 3 > 0 if masked else None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        routing = router(x, mask=mask)
    assert not [t for t in saved if t.shape == x.shape and t.dtype is torch.float32]
    assert masked or any(t.data_ptr() == x.data_ptr() for t in saved)
    wide, leaf = make(bias=bias), x.detach().float().requires_grad_()
    wide.load_state_dict({name: value.float() for name, value in router.state_dict().items()})
    want = wide(leaf, mask=mask)
    assert torch.equal(routing.weights, want.weights)
    factors = torch.randn(routing.weights.shape)
    have = torch.autograd.grad((routing.weights * factors).sum(), [x, *router.parameters()])
    want = torch.autograd.grad((want.weights * factors).sum(), [leaf, *wide.parameters()])
    for a, b in zip(have, want, strict=True):
        assert a.dtype is torch.bfloat16
        torch.testing.assert_close(a, b.bfloat16(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("assign", [False, True])
def test_a_correction_bias_of_another_dtype_is_loaded_as_float32(assign):
    router = make(correction_bias=True)
    state = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state, assign=assign)
    assert router.correction_bias.dtype is torch.float32
