import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.routers.sinkhorn import SinkhornRouter
from oracle import Inputs, naive_experts

HIDDEN, EXPERTS, TOP_K = 16, 6, 2


def make(top_k: int = TOP_K, seed: int = 0, **choices) -> SinkhornRouter:
    torch.manual_seed(seed)
    return SinkhornRouter(HIDDEN, num_experts=EXPERTS, top_k=top_k, **choices)


def skewed(top_k: int = TOP_K) -> SinkhornRouter:
    router = make(top_k, bias=True)
    torch.nn.init.normal_(router.bias, std=3)
    return router


def expected(rows: list[list[float]], top_k: int, iterations: int) -> list[list[int]]:
    """Megatron-LM's scaling of exponentials, in plain numbers."""
    matrix = [[math.exp(value) for value in row] for row in rows]
    columns = [1.0] * EXPERTS
    for _ in range(iterations):
        of_row = [1 / len(rows) / sum(c * v for c, v in zip(columns, row, strict=True)) for row in matrix]
        columns = [
            1 / EXPERTS / sum(r * row[expert] for r, row in zip(of_row, matrix, strict=True))
            for expert in range(EXPERTS)
        ]
    return [sorted(range(EXPERTS), key=lambda e: -columns[e] * row[e])[:top_k] for row in matrix]


@pytest.mark.parametrize("iterations", [1, 3, 16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_is_the_definition(top_k, iterations):
    router, x = skewed(top_k), torch.randn(40, HIDDEN)
    router.iterations = iterations
    routing = router(x)
    logits = x.double() @ router.weight.detach().double().t() + router.bias.detach().double()
    assert routing.index.tolist() == expected(logits.tolist(), top_k, iterations)
    scores = torch.sigmoid(logits) if top_k == 1 else logits.softmax(-1)
    torch.testing.assert_close(routing.weights, scores.gather(1, routing.index).float())


@pytest.mark.parametrize("top_k", [1, 2])
def test_evaluation_is_plain_top_k(top_k):
    router, x = skewed(top_k).eval(), torch.randn(40, HIDDEN)
    routing = router(x)
    assert torch.equal(routing.index, routing.logits.topk(top_k).indices)


@pytest.mark.parametrize("top_k", [1, 2])
def test_training_balances_skewed_logits(top_k):
    router, x = skewed(top_k), torch.randn(600, HIDDEN)

    def imbalance() -> float:
        load = router(x).tokens_per_expert().double()
        return (load.max() / load.mean()).item()

    assert imbalance() < 1.25
    router.eval()
    assert imbalance() > 2


def test_scaling_cannot_overflow():
    router = make()
    torch.nn.init.normal_(router.weight, std=1e4)
    x = torch.randn(200, HIDDEN)
    index = router(x).index
    assert all(len(set(row)) == TOP_K for row in index.tolist())
    assert router._balanced(router(x).logits.detach(), None).isfinite().all()


@given(st.integers(0, 30), st.integers(1, EXPERTS), st.integers(0, 9))
def test_padding_takes_no_part(tokens, top_k, seed):
    router = make(top_k, seed, dtype=torch.float64)
    x, mask = torch.randn(tokens, HIDDEN, dtype=torch.float64), torch.rand(tokens) < 0.6
    masked = router(torch.where(mask.unsqueeze(1), x, float("nan")), mask=mask)
    without = router(x[mask])
    if mask.sum() > 1:  # of a single token, all experts are equal
        assert torch.equal(masked.index[mask], without.index)
    assert (masked.index[~mask] < 0).all()
    assert (masked.weights[~mask] == 0).all()
    assert all(len(set(row)) == top_k for row in masked.asked().tolist())


@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_any_number_of_tokens(tokens):
    routing = make()(torch.randn(tokens, HIDDEN))
    assert routing.index.shape == routing.weights.shape == (tokens, TOP_K)
    nobody = make()(torch.randn(tokens, HIDDEN), mask=torch.zeros(tokens, dtype=torch.bool))
    assert nobody.tokens_per_expert().sum() == 0


def test_unavailable_experts_serve_nobody_and_the_others_stay_balanced():
    router, x = skewed(), torch.randn(600, HIDDEN)
    router.unavailable = torch.arange(EXPERTS) == 2
    load = router(x).tokens_per_expert()
    assert load[2] == 0
    assert load.sum() == 600 * TOP_K
    assert load.max() < 1.25 * 600 * TOP_K / 5


@pytest.mark.parametrize("top_k", [1, 2])
def test_gradients_are_those_of_finite_differences(top_k):
    router = make(top_k, dtype=torch.float64, bias=True)
    x = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)

    def outputs(x, weight, bias):
        routing = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,))
        return routing.weights, routing.logits

    assert torch.autograd.gradcheck(outputs, (x, router.weight, router.bias))


def test_capacity_limits_what_is_left_of_imbalance():
    routing = SinkhornRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, capacity_factor=1.0)(torch.randn(60, HIDDEN))
    assert routing.tokens_per_expert().max() <= 20
    assert routing.tokens_per_expert().sum() + routing.dropped() == 120


def test_replay_repeats_the_choices():
    router, x = skewed(), torch.randn(20, HIDDEN)
    recorded = router(x)
    replayed = router.eval()(x, replay=recorded)
    assert torch.equal(replayed.index, recorded.index)
    assert torch.equal(replayed.weights, recorded.weights)
    assert not torch.equal(router(x).index, recorded.index)


@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_a_break(training):
    router, x, mask = skewed().train(training), torch.randn(20, HIDDEN), torch.arange(20) % 4 != 1
    have = torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask=mask)
    want = router(x, mask=mask)
    assert torch.equal(have.index, want.index)
    torch.testing.assert_close(have.weights, want.weights)


def test_runs_on_meta():
    routing = make(device="meta")(torch.empty(9, HIDDEN, device="meta"))
    assert routing.index.shape == (9, TOP_K)
    assert routing.index.is_meta
    assert routing.weights.is_meta


def test_layer_computes_what_the_choices_say():
    layer = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=12), router=skewed())
    x = torch.randn(11, HIDDEN, requires_grad=True)
    out, routing = layer(x), layer.route(x)
    parameters = (layer.experts.gate_up_proj.double(), layer.experts.down_proj.double())
    want = naive_experts(Inputs(x.double(), routing.index, routing.weights.double(), *parameters))
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    wanted, grad = [x, *layer.parameters()], torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, wanted, grad.double()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("iterations", [0, 1.5])
def test_iterations_must_be_positive(iterations):
    with pytest.raises(InputError, match="SinkhornRouter: iterations must be a positive integer"):
        make(iterations=iterations)


def test_prints_its_choices():
    assert repr(make(iterations=4)) == "SinkhornRouter(16, num_experts=6, top_k=2, iterations=4)"
