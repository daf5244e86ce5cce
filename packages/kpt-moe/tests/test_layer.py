import copy
import pickle

import pytest
import torch

import kpt_core
from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer, Routing
from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.losses import switch_loss
from kpt_moe.routers import SCORES
from oracle import ACTIVATIONS, GATED, Inputs, naive_experts

SMALL = {"hidden_size": 16, "num_experts": 4, "top_k": 2, "intermediate_size": 12}


def make(dtype: torch.dtype | None = None, **choices) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(**{**SMALL, **choices}), dtype=dtype)
    for bias in (layer.experts.gate_up_proj_bias, layer.experts.down_proj_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    return layer


def naive(layer: MoELayer, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The layer by the oracle, in x's dtype, with a routing that was decided already."""
    parts = (
        layer.experts.gate_up_proj,
        layer.experts.down_proj,
        layer.experts.gate_up_proj_bias,
        layer.experts.down_proj_bias,
    )
    parameters = (None if part is None else part.to(x.dtype) for part in parts)
    inputs = Inputs(x.reshape(-1, x.shape[-1]), routing.index, routing.weights.to(x.dtype), *parameters)
    return naive_experts(inputs, activation=layer.config.activation).view(x.shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_gradients(activation, bias):
    layer = make(activation=activation, bias=bias)
    x = torch.randn(2, 9, 16, requires_grad=True)
    out = layer(x)
    expected = naive(layer, x.double(), layer.route(x))
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    wanted = [x, *layer.parameters()]
    grad = torch.randn_like(out)
    have = torch.autograd.grad(out, wanted, grad)
    want = torch.autograd.grad(expected, wanted, grad.double())
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", [score for score in SCORES if score != "softmax_after"])
def test_router_is_configured(score, renormalize):
    layer = make(score=score, renormalize=renormalize)
    assert (layer.router.score_function, layer.router.renormalize, layer.router.top_k) == (score, renormalize, 2)
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), naive(layer, x, layer.route(x)))


@pytest.mark.parametrize("shape", [(16,), (1, 16), (0, 16), (63, 16), (2, 0, 16), (2, 3, 4, 16)])
def test_any_leading_shape(shape):
    x = torch.randn(shape)
    out = make()(x)
    assert out.shape == x.shape
    torch.testing.assert_close(out.reshape(-1, 16), make()(x.reshape(-1, 16)))


def test_non_contiguous_input():
    x = torch.randn(16, 5, 3).permute(2, 1, 0)
    torch.testing.assert_close(make()(x), make()(x.contiguous()))


def test_given_routing_replaces_the_router():
    layer = make()
    x = torch.randn(3, 16)
    routing = Routing(torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2), torch.empty(0))
    torch.testing.assert_close(layer(x, routing), naive(layer, x, routing))
    (router_gradient,) = torch.autograd.grad(layer(x, routing).sum(), layer.router.weight, allow_unused=True)
    assert router_gradient is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    layer = make(dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    out = layer(torch.randn(4, 16).to(dtype))
    assert out.dtype is dtype
    out.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {dtype}


def test_autocast_computes_low_and_returns_the_dtype_of_its_input():
    layer, x = make(), torch.randn(50, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.float32
    assert not torch.equal(out, layer(x))
    torch.testing.assert_close(out, layer(x), rtol=0.05, atol=0.05)
    out.sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_runs_on_meta():
    layer = MoELayer(MoEConfig(**SMALL, bias=True), device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    out = layer(torch.empty(2, 5, 16, device="meta", dtype=torch.bfloat16))
    assert (out.shape, out.dtype, out.device.type) == ((2, 5, 16), torch.bfloat16, "meta")
    assert not list(layer.buffers())


def test_kpt_serves_it():
    layer, x = make(), torch.randn(4, 16)
    with kpt_core.record() as log:
        layer(x)
    assert [selection.op for selection in log] == ["moe.top_k_gating", "moe.experts"]


def test_survives_copy_pickle_and_state_dict():
    layer, x = make(bias=True), torch.randn(4, 16)
    want = layer(x)
    other = MoELayer(MoEConfig(**SMALL, bias=True))
    other.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(same(x), want)
        assert same.config == layer.config


def test_parameters_are_named_and_shaped_as_in_transformers():
    shapes = {name: tuple(p.shape) for name, p in make(bias=True).named_parameters()}
    assert shapes == {
        "router.weight": (4, 16),
        "experts.gate_up_proj": (4, 24, 16),
        "experts.down_proj": (4, 16, 12),
        "experts.gate_up_proj_bias": (4, 24),
        "experts.down_proj_bias": (4, 16),
    }
    assert make(activation="relu2").experts.gate_up_proj.shape == (4, 12, 16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_width_defaults_to_four_times_hidden(activation):
    config = MoEConfig(hidden_size=8, num_experts=2, activation=activation)
    layer = MoELayer(config)
    assert config.expert_width == layer.experts.down_proj.shape[2] == 32
    assert layer.experts.gate_up_proj.shape[1] == (64 if activation in GATED else 32)


def test_initial_output_keeps_the_scale_of_its_input():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden_size=128, num_experts=4, intermediate_size=128), dtype=torch.float32)
    assert layer.experts.gate_up_proj.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert layer.experts.down_proj.std().item() == pytest.approx(128**-0.5, rel=0.05)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_break(dynamic):
    layer = make(bias=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 6):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(compiled(x), layer(x))
    layer.zero_grad()
    compiled(x).square().sum().backward()
    have = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for a, p in zip(have, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_exports_with_any_number_of_tokens():
    layer, any_size = make(), torch.export.Dim.DYNAMIC
    program = torch.export.export(layer, (torch.randn(2, 5, 16),), dynamic_shapes={"x": {0: any_size, 1: any_size}})
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("size", [0, -4, 1.5, "8", True, None])
@pytest.mark.parametrize("name", ["hidden_size", "num_experts", "top_k", "intermediate_size"])
def test_sizes_must_be_positive_integers(name, size):
    if name == "intermediate_size" and size is None:
        assert MoEConfig(**{**SMALL, name: None}).expert_width == 64
        return
    with pytest.raises(InputError, match=f"MoEConfig: {name} must be a positive integer; got {size!r}"):
        MoEConfig(**{**SMALL, name: size})


def test_top_k_must_not_exceed_the_experts():
    with pytest.raises(InputError, match=r"top_k \(5\) must not exceed num_experts \(4\)"):
        MoEConfig(hidden_size=8, num_experts=4, top_k=5)


def test_unknown_activation_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown activation 'gelutanh': did you mean 'gelu_tanh'"):
        MoEConfig(**SMALL, activation="gelutanh")


def test_a_number_alone_is_refused():
    with pytest.raises(InputError, match=r"the last size of x must be hidden_size=16; got \[\]"):
        make()(torch.tensor(1.0))


def test_wrong_hidden_size_is_named():
    with pytest.raises(InputError, match=r"the last size of x must be hidden_size=16; got \[3, 8\]"):
        make()(torch.ones(3, 8))


def test_prints_its_sizes():
    shown = repr(make())
    assert "TopKRouter(16, num_experts=4, top_k=2, renormalize=True)" in shown
    assert "FeedForwardExpert(4, 16, intermediate_size=12, activation='swiglu', bias=False)" in shown


@pytest.mark.parametrize("router", ["learned", "dynamic_capacity", "top_k"])
def test_choices_reach_every_router_that_has_them(router):
    assert not make(router=router, renormalize=False).router.renormalize
    if router != "dynamic_capacity":
        assert make(router=router, score="sigmoid").router.score_function == "sigmoid"


@pytest.mark.parametrize(
    ("router", "choice"), [("gshard", {"score": "sigmoid"}), ("expert_choice", {"renormalize": False})]
)
def test_choices_that_a_router_does_not_have_are_refused(router, choice):
    with pytest.raises(InputError, match=f"does not take these router_options.*{next(iter(choice))}"):
        make(router=router, **choice)


def test_capacity_in_evaluation_is_that_of_training_unless_given():
    router = make(router="switch", top_k=1, capacity_factor=1.5).router
    assert (router.capacity_factor, router.eval_capacity_factor) == (1.5, None)
    router = make(router="switch", top_k=1, eval_capacity_factor=3.0).router
    assert (router.capacity_factor, router.eval_capacity_factor) == (1.25, 3.0)


def test_a_mask_beside_a_routing_without_one_is_refused():
    layer, x, mask = make(), torch.randn(5, 16), torch.arange(5) < 3
    with pytest.raises(InputError, match="was made without a mask"):
        layer(x, layer.route(x), mask=mask)
    assert (layer(x, layer.route(x, mask=mask), mask=mask)[3:] == 0).all()


def test_shared_experts_that_an_adapter_wraps_have_no_blocks():
    class Adapted(torch.nn.Linear):
        pass

    layer, x = make(num_shared_experts=1), torch.randn(3, 16)
    with batch_invariant():
        layer(x)
        layer.shared_experts.down_proj = Adapted(12, 16)
        with pytest.raises(InputError, match="Adapted has no batch-invariant form: merge its adapters"):
            layer(x)


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 2, 6), (2, 2, 3, 2)], ids=str)
def test_padding_gives_one_loss_whatever_the_dimensions_of_its_mask(shape):
    layer, x, mask = make(), torch.randn(24, 16), torch.arange(24) % 6 < 4
    routing = layer.route(x.view(*shape, 16), mask=mask.view(shape))
    torch.testing.assert_close(switch_loss(routing), switch_loss(layer.route(x[mask])))
    (grad,) = torch.autograd.grad(switch_loss(routing), layer.router.weight)
    torch.testing.assert_close(grad, torch.autograd.grad(switch_loss(layer.route(x[mask])), layer.router.weight)[0])


def test_an_attention_mask_of_pairs_is_refused():
    pairs = torch.ones(2, 1, 5, 5, dtype=torch.bool)  # as attention takes it: it does not say which tokens are padding
    with pytest.raises(InputError, match=r"mask must be bool \[2, 5\]; got torch.bool \[2, 1, 5, 5\]"):
        make()(torch.randn(2, 5, 16), mask=pairs)
