import math

import pytest
import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer, Routing
from kpt_moe.expert_networks.attention import AttentionExpert
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

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow


def make(num_heads: int = 2, causal: bool = True, bias: bool = True, **place) -> AttentionExpert:
    return AttentionExpert(8, num_experts=EXPERTS, head_dim=6, num_heads=num_heads, causal=causal, bias=bias, **place)


def ends(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def naive(network: AttentionExpert, x: Tensor, routing: Routing, sequences: list[tuple[int, int]]) -> Tensor:
    """Head by head of every choice that is served, by the definition of attention."""
    out, dim = torch.zeros_like(x), network.head_dim
    keys, values = (
        x @ linear.weight.t() + (0 if linear.bias is None else linear.bias)
        for linear in (network.key_proj, network.value_proj)
    )
    for token, expert, weight in served(routing):
        start, end = next((start, end) for start, end in sequences if start <= token < end)
        seen = [
            other
            for other in range(start, token + 1 if network.causal else end)
            if routing.mask is None or routing.mask[other]
        ]
        query = network.query_proj[expert] @ x[token]
        if network.query_proj_bias is not None:
            query = query + network.query_proj_bias[expert]
        heads = []
        for head in range(network.num_heads):
            part = slice(head * dim, (head + 1) * dim)
            scores = torch.stack([query[part] @ keys[other, part] / math.sqrt(dim) for other in seen])
            exponentials = (scores - scores.max()).exp()
            heads.append(exponentials / exponentials.sum() @ values[seen, part])
        y = network.out_proj[expert] @ torch.cat(heads)
        if network.out_proj_bias is not None:
            y = y + network.out_proj_bias[expert]
        out = out.index_add(0, torch.tensor([token]), (weight * y).unsqueeze(0))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("num_heads", "causal", "bias"), [(1, True, True), (2, False, False), (3, True, False)])
def test_value_and_gradients(num_heads, causal, bias, kind, tokens):
    network = randomised(make(num_heads, causal, bias, dtype=torch.float64))
    x, routing = torch.randn(tokens, 8, dtype=torch.float64), ROUTINGS[kind](tokens)
    have = value_and_gradients(network, network, x, routing)
    want = value_and_gradients(network, lambda *a: naive(network, *a, [(0, tokens)]), x, routing)
    torch.testing.assert_close(have, want)


def test_value_of_a_longer_sequence():
    network, routing = randomised(make(dtype=torch.float64)), ROUTINGS["refused"](63)
    x = torch.randn(63, 8, dtype=torch.float64)
    torch.testing.assert_close(network(x, routing), naive(network, x, routing, [(0, 63)]))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("causal", [True, False])
def test_no_token_attends_to_another_sequence(causal, kind):
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
        assert equal == [causal] * 5


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_are_chosen_tokens_see_up_to_their_token(causal):
    network, x = randomised(make(causal=causal, dtype=torch.float64)), torch.randn(9, 8, dtype=torch.float64)
    chosen = ROUTINGS["chosen_tokens"](9)
    routing = Routing(chosen.index, chosen.weights, chosen.logits, None, chosen.token)
    torch.testing.assert_close(network(x, routing), naive(network, x, routing, [(0, 9)]))


@pytest.mark.parametrize("kind", ["refused", "chosen_tokens"])
def test_no_row_is_without_a_key(kind):
    """Kernels of attention differ in what they give where nothing is seen."""
    x, routing = torch.randn(9, 8), ROUTINGS[kind](9)
    assert not routing.counts().all()
    assert make()._visible(x, routing, ends(*range(10))).any(1).all()


def test_one_expert_that_all_choose_is_multi_head_attention():
    network = randomised(AttentionExpert(8, num_experts=1, head_dim=4, num_heads=2, causal=False, dtype=torch.float64))
    x = torch.randn(7, 8, dtype=torch.float64)
    ones = torch.ones(7, 1, dtype=torch.float64)
    projections = torch.cat((network.query_proj[0], network.key_proj.weight, network.value_proj.weight))
    want, _ = torch.nn.functional.multi_head_attention_forward(
        *[x.unsqueeze(1)] * 3, 8, 2, projections, None, None, None, False, 0.0, network.out_proj[0], None
    )
    torch.testing.assert_close(network(x, Routing(torch.zeros(7, 1, dtype=torch.int64), ones, ones)), want[:, 0])


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_are_those_of_differences(kind):
    network = randomised(make(dtype=torch.float64))
    check_gradients(network, torch.randn(7, 8, dtype=torch.float64), ROUTINGS[kind](7), ends(0, 3, 7))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cu_seqlens", [None, ends(0, 1, 2, 13)])
def test_padding_is_not_seen(cu_seqlens, causal):
    check_padding_is_not_seen(randomised(make(causal=causal, dtype=torch.float64)), cu_seqlens)


def test_low_precision():
    check_low_precision(make)


@pytest.mark.parametrize("cu_seqlens", [pytest.param(None, marks=slow), lambda tokens: ends(0, 4, tokens)])
def test_compiles_without_a_break(cu_seqlens):
    check_compiles(randomised(make(dtype=torch.float64)), cu_seqlens)


def test_survives_copies_and_runs_on_meta():
    check_copies(make)


def test_serves_in_a_layer_where_each_row_is_a_sequence():
    config = MoEConfig(hidden_size=8, num_experts=EXPERTS, top_k=2)
    layer = MoELayer(config, experts=randomised(make(dtype=torch.float64)), dtype=torch.float64)
    x, mask = torch.randn(2, 9, 8, dtype=torch.float64), torch.arange(9) < torch.tensor([[7], [9]])
    want = naive(layer.experts, x.flatten(0, 1), layer.route(x, mask=mask), [(0, 9), (9, 18)])
    torch.testing.assert_close(layer(x, mask=mask), want.view(2, 9, 8))


def test_keys_and_values_are_shared_by_the_experts():
    few, many = (
        sum(p.numel() for p in AttentionExpert(8, num_experts=experts, head_dim=6, num_heads=2).parameters())
        for experts in (1, 5)
    )
    assert few == 4 * 8 * 12
    assert many - few == 4 * (2 * 8 * 12)


def test_fresh_parameters():
    network = AttentionExpert(64, num_experts=4, head_dim=32, num_heads=4, bias=True)
    torch.nn.init.ones_(network.key_proj.weight)
    network.reset_parameters()
    for weight in (network.query_proj, network.key_proj.weight, network.value_proj.weight, network.out_proj):
        assert weight.std().item() == pytest.approx(weight.shape[-1] ** -0.5, rel=0.1)
    assert not any(p.any() for name, p in network.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", ["head_dim", "num_heads"])
def test_sizes_must_be_positive_integers(name):
    with pytest.raises(InputError, match=f"AttentionExpert: {name} must be a positive integer; got 0"):
        AttentionExpert(8, num_experts=4, **{name: 0})


def test_wrong_inputs_are_named():
    network, routing = make(), ROUTINGS["top_2"](5)
    with pytest.raises(InputError, match=r"x must be \[tokens, 8\]; got \[5, 7\]"):
        network(torch.ones(5, 7), routing)
    with pytest.raises(InputError, match=r"cu_seqlens must be int32 of shape \[sequences \+ 1\] on cpu; got torch.int"):
        network(torch.ones(5, 8), routing, cu_seqlens=torch.tensor([[0, 5]]))


def test_prints_its_sizes():
    assert "4, 8, head_dim=6, num_heads=2, causal=True" in repr(make())


def test_what_comes_back_for_padding_does_not_leak():
    network, x, grad = randomised(make().double()), torch.randn(13, 8).double(), torch.randn(13, 8).double()
    routing = ROUTINGS["refused"](13)
    assert not routing.mask.all()
    clean, poisoned = (grad.masked_fill(~routing.mask[:, None], value) for value in (0.0, math.nan))
    want, have = (torch.autograd.grad(network(x, routing), list(network.parameters()), g) for g in (clean, poisoned))
    torch.testing.assert_close(have, want, rtol=0, atol=0)
