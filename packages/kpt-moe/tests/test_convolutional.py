import pytest
import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer, Routing
from kpt_moe.expert_networks.convolutional import ConvolutionalExpert
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


def make(kernel_size: int = 3, causal: bool = True, activation: str = "swiglu", bias: bool = True, **place):
    return ConvolutionalExpert(
        8,
        num_experts=EXPERTS,
        intermediate_size=6,
        kernel_size=kernel_size,
        causal=causal,
        activation=activation,
        bias=bias,
        **place,
    )


def ends(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def naive(network: ConvolutionalExpert, x: Tensor, routing: Routing, sequences: list[tuple[int, int]]) -> Tensor:
    """Neighbour by neighbour of every choice that is served."""
    out, feed_forward = torch.zeros_like(x), network.pointwise
    after = 0 if network.causal else network.kernel_size // 2
    for token, expert, weight in served(routing):
        start, end = next((start, end) for start, end in sequences if start <= token < end)
        seen = torch.zeros_like(x[0]) if network.conv_bias is None else network.conv_bias[expert]
        for tap in range(network.kernel_size):
            neighbour = token + tap - (network.kernel_size - 1 - after)
            if start <= neighbour < end and (routing.mask is None or routing.mask[neighbour]):
                seen = seen + network.conv_weight[expert, tap] * x[neighbour]
        h = feed_forward.gate_up_proj[expert] @ seen
        if feed_forward.gate_up_proj_bias is not None:
            h = h + feed_forward.gate_up_proj_bias[expert]
        y = feed_forward.down_proj[expert] @ activate(h, feed_forward.activation)
        if feed_forward.down_proj_bias is not None:
            y = y + feed_forward.down_proj_bias[expert]
        out = out.index_add(0, torch.tensor([token]), (weight * y).unsqueeze(0))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 63])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("kernel_size", "causal", "activation", "bias"),
    [(3, True, "swiglu", True), (3, False, "gelu", False), (4, False, "geglu", True), (1, True, "relu2", False)],
)
def test_value_and_gradients(kernel_size, causal, activation, bias, kind, tokens):
    network = randomised(make(kernel_size, causal, activation, bias, dtype=torch.float64))
    x, routing = torch.randn(tokens, 8, dtype=torch.float64), ROUTINGS[kind](tokens)
    have = value_and_gradients(network, network, x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a, [(0, tokens)]), x, routing)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("causal", [True, False])
def test_no_window_reaches_into_another_sequence(causal, kind):
    network = randomised(make(causal=causal, dtype=torch.float64))
    x, routing = torch.randn(13, 8, dtype=torch.float64), ROUTINGS[kind](13)
    sequences = [(0, 1), (1, 6), (6, 8), (8, 13)]
    cu_seqlens = ends(0, 1, 6, 6, 8, 13)
    have = value_and_gradients(network, lambda *a: network(*a, cu_seqlens=cu_seqlens), x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a, sequences), x, routing)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_gives_what_it_gives_alone(causal):
    network, x = randomised(make(causal=causal, dtype=torch.float64)), torch.randn(12, 8, dtype=torch.float64)
    routing = ROUTINGS["top_2"](12)
    out = network(x, routing, cu_seqlens=ends(0, 5, 6, 12))
    for start, end in ((0, 5), (5, 6), (6, 12)):
        parts = (t[start:end] for t in (routing.index, routing.weights, routing.logits))
        torch.testing.assert_close(out[start:end], network(x[start:end], Routing(*parts)))


def test_causal_means_that_no_later_token_is_seen():
    x, routing = torch.randn(9, 8), ROUTINGS["top_2"](9)
    changed = torch.cat((x[:5], torch.randn(4, 8)))
    for causal in (True, False):
        network = randomised(make(causal=causal))
        equal = torch.isclose(network(x, routing)[:5], network(changed, routing)[:5]).all(1).tolist()
        assert equal == [True] * 4 + [causal]


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_are_those_of_differences(kind):
    network = randomised(make(dtype=torch.float64))
    check_gradients(network, torch.randn(7, 8, dtype=torch.float64), ROUTINGS[kind](7), ends(0, 3, 7))


@pytest.mark.parametrize("cu_seqlens", [None, ends(0, 5, 13)])
def test_padding_is_not_seen(cu_seqlens):
    check_padding_is_not_seen(randomised(make(dtype=torch.float64)), cu_seqlens)


def test_low_precision():
    check_low_precision(make)


@pytest.mark.parametrize("cu_seqlens", [pytest.param(None, marks=slow), lambda tokens: ends(0, 4, tokens)])
def test_compiles_without_a_break(cu_seqlens):
    check_compiles(randomised(make(causal=False, dtype=torch.float64)), cu_seqlens)


def test_survives_copies_and_runs_on_meta():
    check_copies(make)


def test_serves_in_a_layer_where_each_row_is_a_sequence():
    config = MoEConfig(hidden_size=8, num_experts=EXPERTS, top_k=2)
    layer = MoELayer(config, experts=randomised(make(dtype=torch.float64)), dtype=torch.float64)
    x, mask = torch.randn(2, 9, 8, dtype=torch.float64), torch.arange(9) < torch.tensor([[7], [9]])
    want = naive(layer.experts, x.flatten(0, 1), layer.route(x, mask=mask), [(0, 9), (9, 18)])
    torch.testing.assert_close(layer(x, mask=mask), want.view(2, 9, 8))


def test_the_width_defaults_to_four_times_hidden():
    assert ConvolutionalExpert(8, num_experts=2).pointwise.intermediate_size == 32


def test_fresh_kernels_keep_the_scale_of_their_input():
    network = ConvolutionalExpert(256, num_experts=4, intermediate_size=8, kernel_size=4, bias=True)
    assert network.conv_weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert not network.conv_bias.any()
    torch.nn.init.ones_(network.conv_weight)
    network.reset_parameters()
    assert network.conv_weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("kernel_size", [0, -1, 2.0])
def test_the_kernel_size_must_be_a_positive_integer(kernel_size):
    with pytest.raises(InputError, match="ConvolutionalExpert: kernel_size must be a positive integer"):
        make(kernel_size)


def test_unknown_activation_is_named():
    with pytest.raises(UnknownNameError, match="unknown activation 'swish'"):
        make(activation="swish")


def test_wrong_inputs_are_named():
    network, routing = make(), ROUTINGS["top_2"](5)
    with pytest.raises(InputError, match=r"x must be \[tokens, 8\]; got \[5, 7\]"):
        network(torch.ones(5, 7), routing)
    with pytest.raises(
        InputError, match=r"cu_seqlens must be int32 of shape \[sequences \+ 1\] on cpu; got torch.float"
    ):
        network(torch.ones(5, 8), routing, cu_seqlens=torch.tensor([0.0, 5.0]))


def test_prints_its_sizes():
    assert "(4, 8, kernel_size=3, causal=True" in repr(make()).replace("\n", "").replace("  ", "")
