import copy

import pytest
import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_moe import FeedForwardExpert, MoEConfig, MoELayer, Routing
from kpt_moe.expert_networks.parameter_efficient import MODES, ParameterEfficientExpert
from network_checks import (
    EXPERTS,
    ROUTINGS,
    check_compiles,
    check_copies,
    check_gradients,
    check_low_precision,
    check_padding_is_not_seen,
    randomised,
    served,
    value_and_gradients,
)
from oracle import activate

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

#: A base shared by all experts with either addition, and experts of their own with low-rank updates.
KINDS = (*MODES, "own")


def make(
    kind: str = "lora",
    activation: str = "swiglu",
    bias: bool = True,
    freeze_base: bool = False,
    alpha: float = 6,
    dropout: float = 0.0,
    **place,
) -> ParameterEfficientExpert:
    of_lora = {} if kind == "adapter" else {"alpha": alpha, "dropout": dropout}
    if kind == "own":
        experts = FeedForwardExpert(
            8, num_experts=EXPERTS, intermediate_size=6, activation=activation, bias=bias, **place
        )
        return ParameterEfficientExpert.from_feed_forward(experts, rank=3, freeze_base=freeze_base, **of_lora)
    return ParameterEfficientExpert(
        8,
        num_experts=EXPERTS,
        intermediate_size=6,
        mode=kind,
        rank=3,
        activation=activation,
        bias=bias,
        freeze_base=freeze_base,
        **of_lora,
        **place,
    )


def naive(network: ParameterEfficientExpert, x: Tensor, routing: Routing) -> Tensor:
    """Every choice that is served by itself, the updates multiplied out."""
    out, base = torch.zeros_like(x), network.base
    for token, expert, weight in served(routing):
        own = expert if base.num_experts > 1 else 0
        up, down = base.gate_up_proj[own], base.down_proj[own]
        if network.mode == "lora":
            up = up + 2 * network.up.lora_B[expert] @ network.up.lora_A[expert]
            down = down + 2 * network.down.lora_B[expert] @ network.down.lora_A[expert]
        h = up @ x[token] + (0 if base.gate_up_proj_bias is None else base.gate_up_proj_bias[own])
        y = down @ activate(h, base.activation) + (0 if base.down_proj_bias is None else base.down_proj_bias[own])
        if network.mode == "adapter":
            adapter = network.adapter
            inner = activate(adapter.down_proj[expert] @ y + adapter.down_proj_bias[expert], "gelu")
            y = y + adapter.up_proj[expert] @ inner + adapter.up_proj_bias[expert]
        out = out.index_add(0, torch.tensor([token]), (weight * y).unsqueeze(0))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 63])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", True), ("relu2", False)])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients(kind, activation, bias, routing, tokens):
    network = randomised(make(kind, activation, bias, dtype=torch.float64))
    x, routing = torch.randn(tokens, 8, dtype=torch.float64), ROUTINGS[routing](tokens)
    have = value_and_gradients(network, network, x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a), x, routing)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_differences(kind, routing):
    network = randomised(make(kind, "geglu", dtype=torch.float64))
    check_gradients(network, torch.randn(6, 8, dtype=torch.float64), ROUTINGS[routing](6))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_experts_give_what_the_base_gives(kind, routing):
    network = make(kind, dtype=torch.float64)
    randomised(network.base)
    x, routing = torch.randn(9, 8, dtype=torch.float64), ROUTINGS[routing](9)
    base = network.base
    if kind != "own":
        shared = {name: p.expand(EXPERTS, *p.shape[1:]) for name, p in base.named_parameters()}
        base = FeedForwardExpert(8, num_experts=EXPERTS, intermediate_size=6, bias=True, dtype=torch.float64)
        base.load_state_dict(shared)
    torch.testing.assert_close(network(x, routing), base(x, routing))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["lora", "own"])
@pytest.mark.parametrize("bias", [False, True])
def test_merged_experts_give_the_same(bias, kind, routing):
    network = randomised(make(kind, "geglu", bias, dtype=torch.float64))
    before = copy.deepcopy(network.state_dict())
    merged = network.merge()
    assert type(merged) is FeedForwardExpert
    assert merged.num_experts == EXPERTS
    assert all(p.requires_grad for p in merged.parameters())
    x, routing = torch.randn(9, 8, dtype=torch.float64), ROUTINGS[routing](9)
    want = network(x, routing)
    torch.testing.assert_close(merged(x, routing), want)
    randomised(merged)
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_merging_draws_no_random_numbers_and_keeps_the_mode():
    network, state = make().eval(), torch.get_rng_state()
    assert not network.merge().training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bottleneck_is_not_merged():
    with pytest.raises(InputError, match="merge is of mode 'lora'"):
        make("adapter").merge()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "width"), [("swiglu", 12), ("gelu", 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_trainable_parameters_are_those_that_the_formula_says(kind, activation, width, bias):
    network = make(kind, activation, bias, freeze_base=True)
    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    of_expert = 2 * 8 * 3 + 3 + 8 if kind == "adapter" else 3 * (8 + width + 6 + 8)
    assert trainable == EXPERTS * of_expert
    assert not any(p.requires_grad for p in network.base.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_lets_gradients_through_and_takes_none(kind):
    network = randomised(make(kind, freeze_base=True, dtype=torch.float64))
    x, routing = torch.randn(9, 8, dtype=torch.float64), ROUTINGS["top_2"](9)
    have = value_and_gradients(network, network, x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a), x, routing)
    torch.testing.assert_close(have, want)
    network(x, routing).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())


def test_the_weights_underneath_are_not_copied():
    experts = FeedForwardExpert(8, num_experts=EXPERTS, intermediate_size=6, bias=True).eval()
    pointers = {name: p.data_ptr() for name, p in experts.named_parameters()}
    network = ParameterEfficientExpert.from_feed_forward(experts, rank=3)
    assert {name: p.data_ptr() for name, p in network.base.named_parameters()} == pointers
    assert not network.training
    assert not any(p.requires_grad for p in experts.parameters())


def test_updates_have_the_dtype_and_place_of_the_weights_underneath():
    experts = FeedForwardExpert(8, num_experts=EXPERTS, intermediate_size=6, device="meta", dtype=torch.bfloat16)
    network = ParameterEfficientExpert.from_feed_forward(experts)
    assert {(p.device.type, p.dtype) for p in network.parameters()} == {("meta", torch.bfloat16)}


def saved_bytes(network: ParameterEfficientExpert, x: Tensor, routing: Routing) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(x, routing)
    return sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_training_keeps_no_copy_of_the_frozen_weights(kind):
    torch.manual_seed(0)
    sizes = {"rank": 2} if kind == "own" else {"rank": 2, "mode": kind}
    if kind == "own":
        experts = FeedForwardExpert(64, num_experts=EXPERTS, intermediate_size=512)
        network = ParameterEfficientExpert.from_feed_forward(experts, **sizes)
    else:
        network = ParameterEfficientExpert(64, num_experts=EXPERTS, intermediate_size=512, **sizes)
    frozen = {p.data_ptr(): p.nbytes for p in network.base.parameters()}
    kept = saved_bytes(network, torch.randn(2, 64, requires_grad=True), ROUTINGS["top_2"](2))
    assert kept < sum(frozen.values()) + 128 * 1024


@pytest.mark.parametrize("kind", ["lora", "own"])
def test_dropout_is_of_the_updates_in_training_alone(kind):
    network = randomised(make(kind, dropout=0.5, dtype=torch.float64))
    x, routing = torch.randn(9, 8, dtype=torch.float64), ROUTINGS["top_2"](9)
    assert not torch.equal(network(x, routing), network(x, routing))
    network.eval()
    torch.testing.assert_close(network(x, routing), naive(network, x, routing))
    network.train()
    for update in (network.up, network.down):
        torch.nn.init.zeros_(update.lora_B)
    assert torch.equal(network(x, routing), network(x, routing))


def test_the_scale_is_one_unless_alpha_is_given():
    assert ParameterEfficientExpert(8, num_experts=2, rank=4).up.scale == 1
    assert ParameterEfficientExpert(8, num_experts=2, rank=4, alpha=16).down.scale == 4


def test_reset_adds_nothing_again():
    for kind in KINDS:
        network = randomised(make(kind, dtype=torch.float64))
        network.reset_parameters()
        x, routing = torch.randn(5, 8, dtype=torch.float64), ROUTINGS["top_2"](5)
        added = [p for name, p in network.named_parameters() if "lora_B" in name or "adapter.up_proj" in name]
        assert len(added) == 2
        assert not any(p.any() for p in added)
        assert network.base.gate_up_proj.std() < 0.45
        torch.testing.assert_close(network(x, routing), naive(network, x, routing))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_seen(kind):
    check_padding_is_not_seen(randomised(make(kind, dtype=torch.float64)))


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind):
    check_low_precision(lambda **place: make(kind, **place))


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=slow) for kind in KINDS[1:])])
def test_compiles_without_a_break(kind):
    check_compiles(randomised(make(kind, dtype=torch.float64)))


@pytest.mark.parametrize("kind", KINDS)
def test_survives_copies_and_runs_on_meta(kind):
    check_copies(lambda **place: make(kind, **place))


@pytest.mark.parametrize("kind", KINDS)
def test_serves_in_a_layer(kind):
    config = MoEConfig(hidden_size=8, num_experts=EXPERTS, top_k=2)
    layer = MoELayer(config, experts=randomised(make(kind, dtype=torch.float64)), dtype=torch.float64)
    x, mask = torch.randn(1, 9, 8, dtype=torch.float64), torch.arange(9).unsqueeze(0) < 7
    routing = layer.route(x, mask=mask)
    torch.testing.assert_close(layer(x, mask=mask)[0], naive(layer.experts, x[0], routing))


def test_the_width_defaults_to_four_times_hidden():
    assert ParameterEfficientExpert(8, num_experts=2).base.intermediate_size == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer; got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"mode": "adapter", "alpha": 2.0}, "alpha and dropout are of mode 'lora'"),
        ({"mode": "adapter", "dropout": 0.1}, "alpha and dropout are of mode 'lora'"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(InputError, match=message):
        ParameterEfficientExpert(8, num_experts=4, intermediate_size=6, **arguments)


def test_unknown_mode_is_named():
    with pytest.raises(UnknownNameError, match="unknown mode 'loro'"):
        ParameterEfficientExpert(8, num_experts=4, intermediate_size=6, mode="loro")


def test_only_feed_forward_experts_get_updates():
    with pytest.raises(InputError, match="experts must be a FeedForwardExpert; got Linear"):
        ParameterEfficientExpert.from_feed_forward(torch.nn.Linear(2, 2))


def test_wrong_tokens_are_named():
    with pytest.raises(InputError, match=r"x must be \[tokens, 8\]; got \[5, 7\]"):
        make()(torch.ones(5, 7), ROUTINGS["top_2"](5))


def test_prints_its_sizes():
    shown = repr(make(freeze_base=True))
    assert "4, 8, mode='lora', freeze_base=True" in shown
    assert "LowRankUpdate(4, 8, 12, rank=3, scale=2.0)" in shown
    assert "BottleneckAdapter(4, 8, rank=3)" in repr(make("adapter"))
