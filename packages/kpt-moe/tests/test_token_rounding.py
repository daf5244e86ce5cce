import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.routers.token_rounding import ROUNDINGS, TokenRoundingRouter
from kpt_moe.routing import Routing
from oracle import Inputs, naive_experts

HIDDEN, EXPERTS, TOP_K, TILE = 16, 6, 2, 8

roundings = pytest.mark.parametrize("rounding", ROUNDINGS)


def make(top_k: int = TOP_K, seed: int = 0, tile: int = TILE, **choices) -> TokenRoundingRouter:
    torch.manual_seed(seed)
    return TokenRoundingRouter(HIDDEN, num_experts=EXPERTS, top_k=top_k, tile=tile, **choices)


def scores_of(router: TokenRoundingRouter, x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ router.weight.detach().double().t()).softmax(-1)


def made(routing: Routing) -> dict[tuple[int, int], float]:
    """(token, expert) to weight; no pair may come twice."""
    rows = zip(routing.token.tolist(), routing.index[:, 0].tolist(), routing.weights[:, 0].tolist(), strict=True)
    pairs = [(token, expert, weight) for token, expert, weight in rows if 0 <= expert < EXPERTS]
    found = {(token, expert): weight for token, expert, weight in pairs}
    assert len(found) == len(pairs)
    return found


def expected(
    scores: torch.Tensor, mask: torch.Tensor | None, top_k: int, tile: int, rounding: str
) -> set[tuple[int, int]]:
    """Expert by expert, from the definition."""
    real = [token for token in range(scores.shape[0]) if mask is None or mask[token]]
    choices = {t: set(sorted(range(EXPERTS), key=lambda e: -scores[t, e].item())[:top_k]) for t in real}
    pairs = set()
    for expert in range(EXPERTS):
        best = sorted(real, key=lambda token: -scores[token, expert].item())
        own = [token for token in best if expert in choices[token]]
        others = [token for token in best if expert not in choices[token]]
        down, rest = divmod(len(own), tile)
        up = {"nearest": 2 * rest >= tile, "up": rest > 0, "down": False}[rounding]
        pairs |= {(token, expert) for token in (own + others)[: (down + (rest > 0 and up)) * tile]}
    return pairs


@roundings
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "tile"), [(0, 8), (1, 8), (1, 1), (5, 3), (63, 8), (63, 7), (63, 128)])
def test_is_the_definition(tokens, tile, masked, rounding):
    router, x = make(tile=tile, rounding=rounding), torch.randn(tokens, HIDDEN)
    mask = torch.arange(tokens) % 3 != 1 if masked else None
    routing, scores = router(x, mask=mask), scores_of(router, x)
    found = made(routing)
    assert set(found) == expected(scores, mask, TOP_K, tile, rounding)
    for (token, expert), weight in found.items():
        assert weight == pytest.approx(scores[token, expert].item(), rel=1e-5)


@roundings
@given(st.integers(0, 40), st.integers(1, EXPERTS), st.integers(1, 12), st.integers(0, 9), st.booleans())
def test_counts_and_choices_are_conserved(rounding, tokens, top_k, tile, seed, masked):
    router, x = make(top_k, seed, tile, rounding=rounding), torch.randn(tokens, HIDDEN) + 0.5
    mask = torch.rand(tokens) < 0.7 if masked else None
    routing = router(x, mask=mask)
    real = tokens if mask is None else int(mask.sum())
    plain = router.eval()(x, mask=mask)
    own, added = routing.index[: tokens * top_k], routing.index[tokens * top_k :]
    asked = torch.where(own < 0, ~own, own).view(tokens, top_k)
    assert torch.equal(asked, plain.asked()), "every choice is there, served or refused"
    assert torch.equal(routing.token[: tokens * top_k], torch.arange(tokens).repeat_interleave(top_k))
    before, after = plain.tokens_per_expert(), routing.tokens_per_expert()
    assert all(n % tile == 0 or (n == real and rounding != "down") for n in after.tolist())
    change = after - before
    assert (change.abs() < tile).all()
    if rounding == "nearest":
        assert (2 * change.abs() <= tile).all()
    assert rounding != "up" or (change >= 0).all()
    assert rounding != "down" or (change <= 0).all()
    assert routing.dropped() + change.sum() == ((added >= 0) & (added < EXPERTS)).sum()
    pairs = list(made(routing))
    assert mask is None or all(mask[token] for token, _ in pairs)
    unused = routing.index[:, 0] == EXPERTS
    assert (routing.token[unused] == 0).all()
    assert (routing.weights[(routing.index < 0) | (routing.index >= EXPERTS)] == 0).all()


@roundings
def test_rows_depend_on_shapes_alone(rounding):
    shapes = {
        make(seed=seed, rounding=rounding)(torch.randn(30, HIDDEN), mask=torch.arange(30) < real).index.shape
        for seed, real in ((0, 0), (1, 7), (2, 30))
    }
    assert shapes == {(60 + EXPERTS * {"nearest": 4, "up": 7, "down": 0}[rounding], 1)}


def test_evaluation_is_plain_top_k():
    x = torch.randn(30, HIDDEN)
    plain = make().eval()(x)
    assert plain.token is None
    assert torch.equal(plain.index, plain.logits.topk(TOP_K).indices)


@roundings
def test_gradients_are_those_of_finite_differences(rounding):
    router = make(dtype=torch.float64, tile=3, bias=True, rounding=rounding)
    x, mask = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True), torch.arange(7) != 0

    def outputs(x, weight, bias):
        routing = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,), {"mask": mask})
        return routing.weights, routing.logits

    assert torch.autograd.gradcheck(outputs, (x, router.weight, router.bias))


@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_padding_reaches_nothing(content):
    mask = torch.arange(20) % 3 != 0
    layer = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=12), router=make(tile=4))
    clean = torch.randn(20, HIDDEN, requires_grad=True)
    dirty = torch.where(mask.unsqueeze(1), clean.detach(), content).requires_grad_()
    outs = [layer(x, mask=mask) for x in (clean, dirty)]
    assert torch.equal(*outs)
    grads = [
        torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))
        for out, x in zip(outs, (clean, dirty), strict=True)
    ]
    torch.testing.assert_close(*grads)


def test_unavailable_experts_serve_nobody():
    router = make(tile=4, rounding="up")
    router.unavailable = torch.arange(EXPERTS) == 2
    load = router(torch.randn(40, HIDDEN)).tokens_per_expert()
    assert load[2] == 0
    assert (load % 4 == 0).all()


def test_replay_repeats_the_choices_with_gradients():
    router, x = make(), torch.randn(20, HIDDEN)
    recorded = router(x)
    with torch.no_grad():
        router.weight.add_(torch.randn_like(router.weight))
    replayed = router(x, replay=recorded)
    assert torch.equal(replayed.index, recorded.index)
    for (token, expert), weight in made(replayed).items():
        assert weight == pytest.approx(scores_of(router, x)[token, expert].item(), rel=1e-5)
    replayed.weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


@roundings
def test_compiles_without_a_break(rounding):
    router, x, mask = make(rounding=rounding), torch.randn(20, HIDDEN), torch.arange(20) % 4 != 1
    have = torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask=mask)
    want = router(x, mask=mask)
    assert torch.equal(have.index, want.index)
    assert torch.equal(have.token, want.token)
    torch.testing.assert_close(have.weights, want.weights)


def test_runs_on_meta():
    routing = make(device="meta")(torch.empty(20, HIDDEN, device="meta"))
    assert routing.index.shape == (40 + EXPERTS * TILE // 2, 1)
    assert all(part.is_meta for part in (routing.index, routing.weights, routing.token))


@roundings
def test_layer_computes_what_the_choices_say(rounding):
    router = make(tile=3, rounding=rounding)
    layer = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=12), router=router)
    x = torch.randn(11, HIDDEN, requires_grad=True)
    out, routing = layer(x), layer.route(x)
    parameters = (layer.experts.gate_up_proj.double(), layer.experts.down_proj.double())
    rows = Inputs(x.double()[routing.token], routing.index, routing.weights.double(), *parameters)
    want = torch.zeros(11, HIDDEN, dtype=torch.float64).index_add(0, routing.token, naive_experts(rows))
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    wanted, grad = [x, *layer.parameters()], torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(want, wanted, grad.double()), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_unknown_rounding_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown rounding 'nearst': did you mean 'nearest'"):
        make(rounding="nearst")


@pytest.mark.parametrize("tile", [0, -1, 2.5])
def test_tile_must_be_positive(tile):
    with pytest.raises(InputError, match="TokenRoundingRouter: tile must be a positive integer"):
        make(tile=tile)


def test_prints_its_choices():
    shown = repr(make(rounding="up"))
    assert shown == ("TokenRoundingRouter(16, num_experts=6, top_k=2, tile=8, rounding='up')")
