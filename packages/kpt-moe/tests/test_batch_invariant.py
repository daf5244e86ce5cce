import sys
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer, create_moe_layer
from kpt_moe.batch_invariant import (
    BLOCK,
    MODE,
    batch_invariant,
    by_rows,
    invariant_experts,
    invariant_linear,
)
from oracle import ACTIVATIONS, Inputs, naive_experts

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

TOKENS = 64
#: Not by its name in the package, which is that of the context too.
module = sys.modules["kpt_moe.batch_invariant"]
SIZES = {"hidden_size": 33, "num_experts": 6, "top_k": 3, "intermediate_size": 23}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["host", "elsewhere"])
def products(request, monkeypatch):
    """The products for host memory, and those that read nothing on the host."""
    if request.param == "elsewhere":
        monkeypatch.setattr(module, "_on_host", module._elsewhere)
        monkeypatch.setattr(module, "segments", None)
    return request.param


def make(dtype: torch.dtype | None = None, **choices) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(**{**SIZES, **choices}), dtype=dtype)
    for bias in (layer.experts.gate_up_proj_bias, layer.experts.down_proj_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    return layer


def batches() -> list[torch.Tensor]:
    """Which tokens are together: each alone, in sevens, in another order, some twice."""
    permuted = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    alone = [torch.tensor([token]) for token in range(0, TOKENS, 13)]
    many = permuted.repeat(9)
    return [*alone, *torch.arange(TOKENS).split(7)[2::3], permuted, many]


def results(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    routing = layer.route(x)
    out = layer(x, routing)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    return {
        "logits": routing.logits,
        "index": routing.index,
        "weights": routing.weights,
        "output": out,
        "gradient": grad_x,
    }


def assert_invariant(layer: MoELayer, dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, TOKENS, layer.config.hidden_size).to(dtype)
    with batch_invariant():
        want = results(layer, x, grad)
        for batch in batches():
            have = results(layer, x[batch], grad[batch])
            for name, value in have.items():
                assert torch.equal(value, want[name][batch]), f"{name} of {len(batch)} tokens"


@dtypes
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_token_gets_the_same_bits_in_any_batch(dtype, score, threads):
    assert_invariant(make(dtype, score=score, bias=True), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_any_activation(activation):
    assert_invariant(make(activation=activation), torch.float32)


@pytest.mark.parametrize("sizes", [(64, 96, 8), (17, 5, 2), (257, 40, 20), (128, 700, 4)])
def test_with_any_sizes(sizes):
    hidden, inner, experts = sizes
    layer = make(hidden_size=hidden, intermediate_size=inner, num_experts=experts, top_k=2, score="softmax_after")
    assert_invariant(layer, torch.float32)


def test_where_host_memory_is_not_read(products):
    assert_invariant(make(bias=True), torch.float32)


def test_under_autocast():
    layer, x = make(bias=True), torch.randn(TOKENS, SIZES["hidden_size"])
    with batch_invariant(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = layer.experts(x, layer.route(x))
        assert torch.equal(layer(x[5:6]), want[5:6])
        assert torch.mm(x, x.t()).dtype is torch.bfloat16, "autocast must go on afterwards"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x), want, rtol=0.05, atol=0.05)
    assert not torch.equal(want, layer(x))


def test_without_the_mode_bits_depend_on_the_batch():
    layer, x = make(bias=True), torch.randn(TOKENS, SIZES["hidden_size"])
    want = layer(x)
    if all(torch.equal(layer(x[batch]), want[batch]) for batch in batches()):
        pytest.skip("this machine's products are the same without it")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu_tanh", "relu2"])
def test_values_and_gradients_are_those_of_the_definition(activation, bias, products):
    layer = make(activation=activation, bias=bias)
    x = torch.randn(19, SIZES["hidden_size"], requires_grad=True)
    with batch_invariant():
        routing = layer.route(x)
        out = layer(x, routing)
    parts = layer.experts
    parameters = (parts.gate_up_proj, parts.down_proj, parts.gate_up_proj_bias, parts.down_proj_bias)
    logits = x.double() @ layer.router.weight.double().t()
    weights = logits.softmax(-1).gather(1, routing.index)
    weights = weights / weights.sum(-1, keepdim=True)
    doubled = (None if part is None else part.double() for part in parameters)
    want = naive_experts(Inputs(x.double(), routing.index, weights, *doubled), activation=activation)
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    wanted, grad = [x, *layer.parameters()], torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, wanted, grad.double()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_the_definition(dtype):
    layer, x = make(dtype, bias=True), torch.randn(40, SIZES["hidden_size"]).to(dtype)
    with batch_invariant():
        have = layer(x)
    torch.testing.assert_close(have, layer(x), rtol=0.03, atol=0.03)


def arguments(tokens: int = 7) -> list[torch.Tensor]:
    index = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]) if tokens else torch.empty(0, 2).long()
    shapes = ((tokens, 6), (tokens, 2), (4, 10, 6), (4, 6, 5), (4, 10), (4, 6))
    x, *rest = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return [x, index, *rest]


def test_experts_are_differentiable_twice():
    x, index, *rest = arguments(3)
    index[0, 0], index[2, 1] = -1, 4

    def call(x, *rest):
        return invariant_experts(x, index, *rest)

    assert torch.autograd.gradcheck(call, (x, *rest))
    assert torch.autograd.gradgradcheck(call, (x, *rest), fast_mode=True)


def test_linear_is_differentiable_twice():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(invariant_linear, (x, weight, bias))
    assert torch.autograd.gradgradcheck(invariant_linear, (x, weight, bias))


@pytest.mark.parametrize("rows", [0, 1, BLOCK, BLOCK + 1, 63])
@dtypes
def test_linear_is_linear(rows, dtype):
    x, weight, bias = torch.randn(rows, 21).to(dtype), torch.randn(6, 21).to(dtype), torch.randn(6).to(dtype)
    want = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    torch.testing.assert_close(invariant_linear(x, weight, bias), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(invariant_linear(x.t().contiguous().t(), weight, bias), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("ids", ["all to one", "none"])
def test_choices_that_are_refused_or_uneven(tokens, ids):
    x, index, weights, *rest = arguments(tokens)
    index = torch.full_like(index, 1) if ids == "all to one" else torch.full_like(index, -2)
    have = invariant_experts(x, index, weights, *rest)
    torch.testing.assert_close(have, naive_experts(Inputs(x, index, weights, *rest)))


def test_refused_tokens_may_hold_anything():
    x, index, weights, *rest = arguments()
    want = invariant_experts(x, index, weights, *rest)
    dirty = torch.where(torch.arange(7)[:, None] == 2, float("nan"), x.detach()).requires_grad_()
    masked = torch.where(torch.arange(7)[:, None] == 2, ~index, index)
    have = invariant_experts(dirty, masked, weights, *rest)
    kept = torch.arange(7) != 2
    assert torch.equal(have[kept], want[kept])
    assert (have[2] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(have.sum(), (dirty, weights, *rest)))


def test_replay_is_the_same_in_training_and_serving():
    layer, x = make(), torch.randn(TOKENS, SIZES["hidden_size"])
    with batch_invariant():
        served = [layer.eval().route(x[t : t + 1]) for t in range(TOKENS)]
        trained = layer.train().route(x)
    assert torch.equal(torch.cat([routing.index for routing in served]), trained.index)
    assert torch.equal(torch.cat([routing.weights for routing in served]), trained.weights)


def test_backward_outside_of_the_block_is_the_same():
    layer, x = make(), torch.randn(TOKENS, SIZES["hidden_size"], requires_grad=True)
    with batch_invariant():
        out = layer(x)
        (want,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], want)


@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, F.gelu, torch.tanh])
@pytest.mark.parametrize(("rows", "width"), [(40, 1), (40, 23), (4000, 101), (33, 1000), (3, 40_000)])
def test_functions_by_rows_have_the_same_bits_wherever_a_row_lies(rows, width, function, threads):
    x = torch.randn(rows, width) * 3
    have = by_rows(function, x)
    torch.testing.assert_close(have, function(x))
    assert all(torch.equal(by_rows(function, x[row : row + 1])[0], have[row]) for row in range(0, rows, rows // 30 + 1))
    assert torch.equal(by_rows(function, x[1:].flip(0)).flip(0), have[1:])
    assert by_rows(function, x[:0]).shape == (0, width)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=slow), True])
def test_compiles_without_a_break_and_follows_the_mode(dynamic):
    layer = make(bias=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (40, 11) if dynamic else (40,):
        x = torch.randn(tokens, SIZES["hidden_size"])
        torch.testing.assert_close(compiled(x), layer(x))
        with batch_invariant():
            want = layer(x)
            assert torch.equal(compiled(x), want)
    layer.zero_grad()
    with batch_invariant():
        compiled(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_runs_on_meta():
    layer = MoELayer(MoEConfig(**SIZES, bias=True), device="meta", dtype=torch.bfloat16)
    with batch_invariant():
        out = layer(torch.empty(2, 5, SIZES["hidden_size"], device="meta", dtype=torch.bfloat16))
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, SIZES["hidden_size"]), torch.bfloat16, "meta")


def test_is_of_the_thread_that_opened_it():
    seen = []
    with batch_invariant():
        other = threading.Thread(target=lambda: seen.append(MODE.on))
        other.start()
        other.join()
        seen.append(MODE.on)
    assert seen == [False, True]


def test_ends_with_the_block():
    with batch_invariant():
        with batch_invariant():
            pass
        assert MODE.on
    assert not MODE.on
    with pytest.raises(ValueError, match="left"), batch_invariant():
        raise ValueError("left")
    assert not MODE.on


def test_cannot_be_opened_inside_a_compiled_function():
    def opened(x):
        with batch_invariant():
            return x + 1

    with pytest.raises(Exception, match=r"batch_invariant\(\) can't be opened inside a compiled function"):
        torch.compile(opened, fullgraph=True, backend="eager")(torch.ones(2))


def test_wrong_arguments_are_named():
    x, index, *rest = arguments()
    with pytest.raises(InputError, match="top_k_index and top_k_weights must both be"):
        invariant_experts(x, index[:3], *rest)


@pytest.mark.parametrize("router", ["learned", "dynamic_capacity", "gshard", "top_k"])
def test_every_router_that_takes_tokens_one_by_one_joins(router):
    options = {"activation": "gelu"} if router == "learned" else {}
    layer = create_moe_layer(
        hidden_size=24, num_experts=6, top_k=2, router=router, router_options=options, num_shared_experts=1,
        shared_gate=True,
    ).eval()  # fmt: skip
    if router == "dynamic_capacity":
        layer.router.min_capacity_factor = layer.router.max_capacity_factor = 6.0  # no token is dropped
    x = torch.randn(37, 24)
    with batch_invariant(), torch.no_grad():
        whole = layer(x)
        parts = torch.cat([layer(part) for part in x.split(5)])
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole, layer(x).detach(), rtol=1e-4, atol=1e-5)


def test_experts_without_the_mode_refuse():
    layer = create_moe_layer(hidden_size=8, num_experts=2, expert="convolutional")
    with batch_invariant(), pytest.raises(InputError, match="ConvolutionalExpert has no batch-invariant way"):
        layer(torch.randn(3, 8))


def test_checkpointing_takes_the_mode_along():
    layer = MoELayer(MoEConfig(hidden_size=16, num_experts=4, intermediate_size=8))
    x = torch.randn(7, 16, requires_grad=True)
    with batch_invariant():
        layer(x).square().sum().backward()
    want, x.grad = x.grad, None
    with batch_invariant():
        out = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: (batch_invariant(), batch_invariant()))
    out.square().sum().backward()
    assert torch.equal(x.grad, want)
