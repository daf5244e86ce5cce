import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_moe import MoEConfig, MoELayer
from kpt_moe.routers.expert_choice import ExpertChoiceRouter
from kpt_moe.routing import Routing
from oracle import Inputs, naive_experts

HIDDEN, EXPERTS, TOP_K = 16, 6, 2


def make(top_k: int = TOP_K, seed: int = 0, **choices) -> ExpertChoiceRouter:
    torch.manual_seed(seed)
    return ExpertChoiceRouter(HIDDEN, num_experts=EXPERTS, top_k=top_k, **choices)


def scores_of(router: ExpertChoiceRouter, x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ router.weight.detach().double().t()).softmax(-1)


def taken(routing: Routing) -> dict[tuple[int, int], float]:
    """(token, expert) to weight; no pair may come twice."""
    rows = zip(routing.token.tolist(), routing.index[:, 0].tolist(), routing.weights[:, 0].tolist(), strict=True)
    pairs = [(token, expert, weight) for token, expert, weight in rows if 0 <= expert < EXPERTS]
    found = {(token, expert): weight for token, expert, weight in pairs}
    assert len(found) == len(pairs)
    return found


def expected(scores: torch.Tensor, mask: torch.Tensor | None, top_k: int, factor: float) -> set[tuple[int, int]]:
    real = [t for t in range(scores.shape[0]) if mask is None or mask[t]]
    capacity = -int(-(round(len(real) * top_k * factor * 1000)) // (EXPERTS * 1000))
    pairs = set()
    for expert in range(EXPERTS):
        best = sorted(real, key=lambda token: -scores[token, expert].item())
        pairs |= {(token, expert) for token in best[:capacity]}
    return pairs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("tokens", [0, 1, 7, 63])
def test_every_expert_takes_its_highest_scores(tokens, factor, masked):
    router, x = make(capacity_factor=factor), torch.randn(tokens, HIDDEN)
    mask = torch.arange(tokens) % 3 != 1 if masked else None
    routing = router(x, mask=mask)
    scores, found = scores_of(router, x), taken(routing)
    assert set(found) == expected(scores, mask, TOP_K, factor)
    for (token, expert), weight in found.items():
        assert weight == pytest.approx(scores[token, expert].item(), rel=1e-5)
    assert len(set(routing.tokens_per_expert().tolist())) == 1, "balanced by construction"
    assert (routing.weights[routing.index >= EXPERTS] == 0).all()
    assert routing.dropped() == 0


@given(st.integers(0, 40), st.integers(1, EXPERTS), st.sampled_from([0.5, 1.0, 1.5]), st.integers(0, 9))
def test_padding_is_as_if_it_were_not_there(tokens, top_k, factor, seed):
    router = make(top_k, seed, capacity_factor=factor)
    x, mask = torch.randn(tokens, HIDDEN), torch.rand(tokens) < 0.6
    place = mask.cumsum(0) - 1
    with_padding = taken(router(torch.where(mask.unsqueeze(1), x, float("nan")), mask=mask))
    without = taken(router(x[mask]))
    assert {(place[token].item(), expert) for token, expert in with_padding} == set(without)
    assert all(mask[token] for token, _ in with_padding)


def test_rows_depend_on_shapes_alone():
    router, x = make(), torch.randn(30, HIDDEN)
    rows = {router(x, mask=torch.arange(30) < real).index.shape for real in (0, 1, 30)}
    assert rows == {(60, 1)}


def test_evaluation_has_its_own_capacity():
    router, x = make(eval_capacity_factor=0.5), torch.randn(24, HIDDEN)
    assert router(x).tokens_per_expert().tolist() == [8] * EXPERTS
    assert router.eval()(x).tokens_per_expert().tolist() == [4] * EXPERTS


def test_unavailable_experts_serve_nobody():
    router = make()
    router.unavailable = torch.arange(EXPERTS) == 2
    assert router(torch.randn(24, HIDDEN)).tokens_per_expert().tolist() == [8, 8, 0, 8, 8, 8]


def test_gradients_are_those_of_finite_differences():
    router, x = make(dtype=torch.float64, bias=True), torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(7) != 2

    def outputs(x, weight, bias):
        routing = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,), {"mask": mask})
        return routing.weights, routing.logits

    assert torch.autograd.gradcheck(outputs, (x, router.weight, router.bias))


@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_padding_reaches_no_gradient(content):
    router, mask = make(), torch.arange(20) % 3 != 0
    clean = torch.randn(20, HIDDEN, requires_grad=True)
    dirty = torch.where(mask.unsqueeze(1), clean.detach(), content).requires_grad_()
    grads = []
    for x in (clean, dirty):
        routing = router(x, mask=mask)
        grads.append(torch.autograd.grad((routing.weights * torch.arange(42.0)[:, None]).sum(), (x, router.weight)))
    torch.testing.assert_close(*grads)


def test_replay_repeats_the_choices_with_gradients():
    router, x = make(), torch.randn(20, HIDDEN)
    recorded = router(x)
    with torch.no_grad():
        router.weight.add_(torch.randn_like(router.weight))
    replayed = router(x, replay=recorded)
    assert torch.equal(replayed.index, recorded.index)
    assert torch.equal(replayed.token, recorded.token)
    for (token, expert), weight in taken(replayed).items():
        assert weight == pytest.approx(scores_of(router, x)[token, expert].item(), rel=1e-5)
    replayed.weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_compiles_without_a_break():
    router, x, mask = make(), torch.randn(20, HIDDEN), torch.arange(20) % 4 != 1
    have = torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask=mask)
    want = router(x, mask=mask)
    assert torch.equal(have.index, want.index)
    assert torch.equal(have.token, want.token)
    torch.testing.assert_close(have.weights, want.weights)


def test_runs_on_meta():
    router = make(device="meta")
    routing = router(torch.empty(18, HIDDEN, device="meta"), mask=torch.empty(18, dtype=torch.bool, device="meta"))
    assert routing.index.shape == (36, 1)
    assert all(part.is_meta for part in (routing.index, routing.weights, routing.token))


def test_layer_computes_what_the_choices_say():
    layer = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=12), router=make())
    x, mask = torch.randn(11, HIDDEN, requires_grad=True), torch.arange(11) != 4
    out, routing = layer(x, mask=mask), layer.route(x, mask=mask)
    rows = Inputs(
        x.double()[routing.token],
        routing.index,
        routing.weights.double(),
        layer.experts.gate_up_proj.double(),
        layer.experts.down_proj.double(),
    )
    want = torch.zeros(11, HIDDEN, dtype=torch.float64).index_add(0, routing.token, naive_experts(rows))
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    wanted, grad = [x, *layer.parameters()], torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, wanted, grad.double()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (out[4] == 0).all()


@pytest.mark.parametrize("option", [{"priority": "weight"}, {"max_experts_per_token": 2}])
def test_options_without_effect_are_refused(option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(option))}'"):
        make(**option)


def test_a_token_whose_logits_overflow_is_not_zero():
    layer = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=12), router=make())
    torch.nn.init.ones_(layer.router.weight)
    x = torch.randn(11, HIDDEN)
    x[2] = 3e38
    out = layer(x)
    assert not out[2].isfinite().any()
    assert out[torch.arange(11) != 2].isfinite().all()


def test_prints_its_choices():
    assert repr(make(bias=True)) == "ExpertChoiceRouter(16, num_experts=6, top_k=2, capacity_factor=1.0, bias=True)"
