"""Feed-forward experts in other libraries' layouts."""

from typing import Any

import pytest
import torch
from torch import nn

from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer, Routing
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.conversion import VariantFeedForwardExpert
from network_checks import (
    EXPERTS,
    ROUTINGS,
    check_compiles,
    check_copies,
    check_gradients,
    check_low_precision,
    randomised,
)
from oracle import activate

VARIANTS = [
    (Activation("swiglu", 1.702, 1.0, 0.8, interleaved=True), True),
    (Activation("swiglu", limit=0.5), False),
    (Activation("geglu", interleaved=True), True),
    (Activation("relu2"), True),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "transposed"), VARIANTS)
def test_variant_experts_equal_the_definition(activation, transposed, bias):
    network = VariantFeedForwardExpert(
        8,
        num_experts=4,
        intermediate_size=6,
        activation=activation,
        transposed=transposed,
        bias=bias,
        dtype=torch.float64,
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(7, 8, dtype=torch.float64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    index[2, 1] = ~index[2, 1]
    weights = torch.rand(7, 2, dtype=torch.float64)
    want = torch.zeros_like(x)
    for t in range(7):
        for e, weight in zip(index[t].tolist(), weights[t], strict=True):
            if e < 0:
                continue
            up, down = network.gate_up_proj[e], network.down_proj[e]
            h = x[t] @ up if transposed else up @ x[t]
            h = h + network.gate_up_proj_bias[e] if bias else h
            options = {name: getattr(activation, name) for name in ("alpha", "beta", "limit", "interleaved")}
            a = activate(h, activation.name, **options)
            y = a @ down if transposed else down @ a
            want[t] += weight * (y + network.down_proj_bias[e] if bias else y)
    routing = Routing(index, weights, torch.zeros(7, 4))
    torch.testing.assert_close(network(x, routing), want)


def variant(**place: Any) -> VariantFeedForwardExpert:
    activation = Activation("swiglu", 1.702, 1.0, 7.0, interleaved=True)
    return VariantFeedForwardExpert(
        8, num_experts=EXPERTS, intermediate_size=6, activation=activation, transposed=True, bias=True, **place
    )


def test_variant_experts_compile_survive_copies_and_run_in_low_precision():
    check_compiles(randomised(variant(dtype=torch.float64)))
    check_copies(variant)
    check_low_precision(variant)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_of_variant_experts_are_those_of_differences(kind):
    check_gradients(randomised(variant(dtype=torch.float64)), torch.randn(6, 8, dtype=torch.float64), ROUTINGS[kind](6))


def test_variant_experts_refuse_what_they_have_not():
    network = VariantFeedForwardExpert(
        8, num_experts=4, intermediate_size=6, activation=Activation("swiglu", interleaved=True), bias=True
    )
    assert not network.gate_up_proj_bias.any()
    assert not network.down_proj_bias.any()
    layer = MoELayer(MoEConfig(hidden_size=8, num_experts=4), experts=network)
    with batch_invariant(), pytest.raises(InputError, match="no batch-invariant way"):
        layer(torch.randn(3, 8))
    with pytest.raises(InputError, match="intermediate_size must be a positive integer; got 0"):
        VariantFeedForwardExpert(8, num_experts=4, intermediate_size=0, activation=Activation("swiglu"))
