"""The layers of the literature, and shared experts."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer, create_moe_layer
from kpt_moe.layers import LAYERS, AdaptiveMoELayer, GLaMStyleMoE, SparseMoELayer, SwitchTransformerMoE
from kpt_moe.routers import TopKRouter
from oracle import Inputs, naive_experts

SIZES = {"hidden_size": 16, "num_experts": 4, "intermediate_size": 12}


def make(kind: str, **config) -> MoELayer:
    torch.manual_seed(0)
    return create_moe_layer(kind, **{**SIZES, **config})


def oracle(layer: MoELayer, x: torch.Tensor, routing) -> torch.Tensor:
    """The experts' part in float64, for choices and weights that were made already."""
    experts = layer.experts
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
    parameters = (
        experts.gate_up_proj.double(),
        experts.down_proj.double(),
        *(None if b is None else b.double() for b in biases),
    )
    inputs = Inputs(x.double(), routing.index, routing.weights.double(), *parameters)
    return naive_experts(inputs, activation=layer.config.activation)


@pytest.mark.parametrize("kind", LAYERS)
def test_value_is_that_of_its_routing(kind):
    layer = make(kind)
    x = torch.randn(40, 16)
    routing = layer.route(x)
    torch.testing.assert_close(layer(x, routing), oracle(layer, x, routing).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_parameter_gets_a_gradient(kind):
    layer = make(kind)
    layer(torch.randn(64, 16)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", LAYERS)
def test_compiles_without_a_break(kind):
    layer = make(kind).eval()
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_is_neither_seen_nor_served(kind):
    layer, x = make(kind), torch.randn(3, 6, 16)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    poisoned = x.clone()
    poisoned[~mask] = float("nan")
    for part in (layer.eval(), layer.eval()):
        have = part(poisoned, mask=mask)
        want = part(torch.where(mask.unsqueeze(-1), x, 0), mask=mask)
        torch.testing.assert_close(have[mask], want[mask])
    assert layer.route(poisoned, mask=mask).tokens_per_expert().sum() <= mask.sum() * layer.router.top_k


@pytest.mark.parametrize("kind", ["sparse", "switch", "glam"])
def test_no_expert_exceeds_its_capacity_and_what_does_is_dropped_and_counted(kind):
    layer = make(kind)
    torch.nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[0] = 1  # all tokens want expert 0
    x = torch.rand(64, 16)
    routing = layer.route(x)
    most = -(-64 * layer.router.top_k * layer.config.capacity_factor // 4)
    assert routing.tokens_per_expert().max() == most
    lost = (routing.index < 0).sum()
    assert routing.dropped() == lost
    assert lost >= 64 - most
    gone = (routing.index != routing.index.clamp(0, 3)).all(1)
    out = layer(x, routing)
    assert torch.equal(out[gone], torch.zeros_like(out[gone]))
    assert (out[~gone].abs().sum(1) > 0).all()


def test_standard_layer_drops_nothing():
    layer = make("standard")
    torch.nn.init.zeros_(layer.router.weight)
    assert layer.route(torch.rand(64, 16)).dropped() == 0


def test_switch_has_one_expert_of_plain_relu_and_takes_more_in_evaluation():
    layer = make("switch")
    assert isinstance(layer, SwitchTransformerMoE)
    assert (layer.config.top_k, layer.config.activation, layer.router.jitter) == (1, "relu", 0.01)
    x = torch.randn(50, 16)
    assert not torch.equal(layer(x), layer(x)), "jitter must change a training step"
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    torch.nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[0] = 1
    most = {}
    for mode in (True, False):
        layer.train(mode)
        most[mode] = layer.route(torch.rand(64, 16)).tokens_per_expert().max().item()
    assert most == {True: 20, False: 32}


def test_glam_uses_the_second_expert_as_often_as_it_weighs():
    layer = make("glam", num_experts=2, capacity_factor=4.0)
    assert isinstance(layer, GLaMStyleMoE)
    torch.nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[0, 0] = 2.0  # probability of expert 0: sigmoid(2) = 0.88, so w2 = 0.12
    x = torch.zeros(20_000, 16)
    x[:, 0] = 1
    routing = layer.router(x)
    share = (routing.index[:, 1] == 1).double().mean().item()
    assert share == pytest.approx(2 * (1 - torch.tensor(2.0).sigmoid().item()), abs=0.01)
    assert routing.dropped() == 0
    layer.eval()
    assert (layer.router(x).index[:, 1] == 1).all()


def test_adaptive_spends_more_on_uncertain_tokens():
    layer = make("adaptive", top_k=3)
    assert isinstance(layer, AdaptiveMoELayer)
    torch.nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[0, 0] = 9.0
    sure, unsure = torch.zeros(20, 16), torch.zeros(20, 16)
    sure[:, 0] = 1
    asked = [layer.route(x).asked_per_expert().sum().item() for x in (sure, unsure)]
    assert asked == [20, 40], "a quarter each: two experts hold more than the threshold of 0.4"
    assert layer.router.capacity(torch.full((20, 4), 0.25), None) == 30
    assert layer.router.capacity(torch.eye(4)[torch.zeros(20).long()], None) == 15


def test_sparse_takes_the_capacity_that_it_is_given():
    assert make("sparse").config.capacity_factor == 1.25
    layer = make("sparse", capacity_factor=0.5, eval_capacity_factor=3.0)
    assert isinstance(layer, SparseMoELayer)
    assert (layer.router.capacity_factor, layer.router.eval_capacity_factor) == (0.5, 3.0)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_shared_experts_are_added(activation, gate):
    layer = make("standard", num_shared_experts=2, shared_gate=gate, activation=activation, bias=True)
    x = torch.randn(3, 5, 16)
    shared = layer.shared_experts
    assert shared.down_proj.in_features == 24
    flat = x.reshape(-1, 16).double()
    h = F.linear(flat, shared.gate_up_proj.weight.double(), shared.gate_up_proj.bias.double())
    a = F.silu(h[:, :24]) * h[:, 24:] if activation == "swiglu" else h.relu() ** 2
    want = F.linear(a, shared.down_proj.weight.double(), shared.down_proj.bias.double())
    if gate:
        want = want * (flat @ shared.gate.weight.double().t()).sigmoid()
    routing = layer.route(x)
    want = want + oracle(layer, flat, routing)
    torch.testing.assert_close(layer(x), want.float().view(x.shape), rtol=1e-4, atol=1e-5)


def test_shared_width_may_be_given():
    assert make("standard", num_shared_experts=1, shared_intermediate_size=7).shared_experts.down_proj.in_features == 7


def test_configuration_survives_pickling():
    config = make("switch", router_options={"priority": "weight"}).config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.router_options == {"jitter": 0.01, "priority": "weight"}


@pytest.mark.parametrize(
    ("kind", "config", "error", "message"),
    [
        ("swich", {}, UnknownNameError, "unknown kind of layer 'swich': did you mean 'switch'"),
        ("standard", {"hiden_size": 3}, UnknownNameError, "unknown field of MoEConfig 'hiden_size': did you mean"),
        ("standard", {"router": "topk"}, UnknownNameError, "unknown router 'topk': did you mean 'top_k'"),
        (
            "standard",
            {"expert": "feedforward"},
            UnknownNameError,
            "unknown kind of experts 'feedforward': did you mean",
        ),
        ("switch", {"top_k": 3}, InputError, "SwitchTransformerMoE: top_k is always 1; got 3"),
        ("glam", {"router": "switch"}, InputError, "GLaMStyleMoE: router is always 'gshard'; got 'switch'"),
        (
            "standard",
            {"router_options": {"jiter": 1}},
            InputError,
            "TopKRouter does not take these router_options.*jiter",
        ),
        (
            "standard",
            {"router": "hash"},
            InputError,
            'HashRouter needs vocab_size: give router_options={"vocab_size": ...}',
        ),
        ("standard", {"shared_gate": True}, InputError, "num_shared_experts is 0"),
        (
            "standard",
            {"num_shared_experts": -1},
            InputError,
            "must be an integer of at least 0; got -1",
        ),
        (
            "sparse",
            {"capacity_factor": -1.0},
            InputError,
            "capacity_factor must be a positive number; got -1.0",
        ),
    ],
)
def test_wrong_choices_are_named(kind, config, error, message):
    with pytest.raises(error, match=message):
        make(kind, **config)


def test_missing_sizes_are_named():
    with pytest.raises(InputError, match="hidden_size and num_experts must be given"):
        create_moe_layer("standard")


def test_parts_must_fit_the_configuration():
    with pytest.raises(
        InputError, match="TopKRouter is for hidden_size 8 and 4 experts, the configuration for 16 and 4"
    ):
        MoELayer(MoEConfig(**SIZES), router=TopKRouter(8, num_experts=4, top_k=2))


def test_parameters_are_made_anew():
    layer = make("standard", num_shared_experts=1, shared_gate=True)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("kind", "choice"),
    [("switch", {"activation": "swiglu"}), ("glam", {"activation": "swiglu"}), ("sparse", {"capacity_factor": None})],
)
def test_what_is_asked_for_by_name_is_not_taken_for_a_default(kind, choice):
    layer = make(kind, **choice)
    assert {name: getattr(layer.config, name) for name in choice} == choice
    assert make(kind).config != layer.config


def test_a_fixed_choice_can_not_be_written_down_otherwise():
    with pytest.raises(InputError, match="SwitchTransformerMoE: top_k is always 1; got 2"):
        make("switch", top_k=2)
