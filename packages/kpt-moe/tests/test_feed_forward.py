import pytest
import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_moe import FeedForwardExpert, Routing
from kpt_moe.activations import Activation
from kpt_moe.experts import experts
from network_checks import (
    EXPERTS,
    ROUTINGS,
    check_compiles,
    check_copies,
    check_gradients,
    check_low_precision,
    randomised,
    served,
    value_and_gradients,
)
from oracle import ACTIVATIONS, activate


def make(activation: str = "swiglu", bias: bool = True, **place) -> FeedForwardExpert:
    return FeedForwardExpert(8, num_experts=EXPERTS, intermediate_size=6, activation=activation, bias=bias, **place)


def naive(network: FeedForwardExpert, x: Tensor, routing: Routing) -> Tensor:
    out = torch.zeros_like(x)
    for token, expert, weight in served(routing):
        h = network.gate_up_proj[expert] @ x[token]
        if network.gate_up_proj_bias is not None:
            h = h + network.gate_up_proj_bias[expert]
        y = network.down_proj[expert] @ activate(h, network.activation)
        if network.down_proj_bias is not None:
            y = y + network.down_proj_bias[expert]
        out = out.index_add(0, torch.tensor([token]), (weight * y).unsqueeze(0))
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_op_with_its_weights(activation, bias):
    network = randomised(make(activation, bias))
    x, routing = torch.randn(9, 8), ROUTINGS["refused"](9)
    want = experts(
        x,
        routing.index,
        routing.weights,
        network.gate_up_proj,
        network.down_proj,
        network.gate_up_proj_bias,
        network.down_proj_bias,
        activation=activation,
    )
    assert torch.equal(network(x, routing), want)


@pytest.mark.parametrize("tokens", [0, 1, 63])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", True), ("gelu", False)])
def test_value_and_gradients(activation, bias, kind, tokens):
    network = randomised(make(activation, bias, dtype=torch.float64))
    x, routing = torch.randn(tokens, 8, dtype=torch.float64), ROUTINGS[kind](tokens)
    have = value_and_gradients(network, network, x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a), x, routing)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_are_those_of_differences(kind):
    network = randomised(make("geglu", dtype=torch.float64))
    check_gradients(network, torch.randn(6, 8, dtype=torch.float64), ROUTINGS[kind](6))


def test_a_token_is_taken_by_itself():
    network, x, routing = make(), torch.randn(6, 8), ROUTINGS["top_2"](6)
    assert torch.equal(network(x, routing, cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32)), network(x, routing))


def test_low_precision():
    check_low_precision(make)


def test_compiles_without_a_break():
    check_compiles(randomised(make(dtype=torch.float64)))


def test_survives_copies_and_runs_on_meta():
    check_copies(make)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parameters_are_those_that_the_formula_says(activation):
    network = make(activation)
    width = 12 if Activation(activation).gated else 6
    assert sum(p.numel() for p in network.parameters()) == EXPERTS * (8 * width + width + 6 * 8 + 8)
    assert not network.gate_up_proj_bias.any()
    assert not network.down_proj_bias.any()


@pytest.mark.parametrize("sizes", [(0, 4, 6), (8, 0, 6), (8, 4, 0), (8, 4, 2.5)])
def test_sizes_must_be_positive_integers(sizes):
    with pytest.raises(InputError, match="must be a positive integer; got"):
        FeedForwardExpert(**dict(zip(("hidden_size", "num_experts", "intermediate_size"), sizes, strict=True)))


def test_unknown_activation_is_named():
    with pytest.raises(UnknownNameError, match="unknown activation 'swish'"):
        make("swish")
