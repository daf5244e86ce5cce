"""What every router promises, whatever it decides by."""

import copy

import pytest
import torch

from kpt_core import InputError
from kpt_moe.routers.base import Router
from kpt_moe.routing import Routing
from router_table import (
    EXPERTS,
    HIDDEN,
    JITTERED,
    RENORMALIZED,
    ROUTERS,
    WITHOUT_PARAMETERS,
    token_ids,
)

TOKENS = 23
MASK = torch.arange(TOKENS) % 4 != 1

every = pytest.mark.parametrize("name", ROUTERS)
gated = pytest.mark.parametrize("name", sorted(set(ROUTERS) - WITHOUT_PARAMETERS))


def make(name: str, device=None, dtype=None) -> Router:
    torch.manual_seed(0)
    router = ROUTERS[name](device, dtype)
    if getattr(router, "correction_bias", None) is not None and device != "meta":
        router.correction_bias.normal_(std=0.1)
    return router


def tokens(count: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def route(router, x, **inputs) -> Routing:
    return router(x, token_ids=token_ids(x.shape[0]).to(x.device), **inputs)


def parts(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return routing.index, routing.weights, routing.logits


def assert_same(have: Routing, want: Routing) -> None:
    for a, b in zip(parts(have), parts(want), strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


def all_weights(router: Router, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Weights as they were before the capacity, by replaying what choices asked for."""
    asked = Routing(routing.asked(), routing.weights, routing.logits)
    return route(router, x, replay=asked).weights


@every
@pytest.mark.parametrize("count", [0, 1, 63])
def test_any_number_of_tokens(name, count):
    router = make(name)
    routing = route(router, tokens(count))
    assert routing.index.shape == routing.weights.shape == (count, router.top_k)
    assert routing.logits.shape == (count, EXPERTS)
    assert routing.index.dtype is torch.int64
    assert routing.weights.isfinite().all()
    for row in routing.asked().tolist():
        chosen = [expert for expert in row if expert < EXPERTS]
        assert chosen
        assert len(set(chosen)) == len(chosen)


@gated
def test_gradients_are_those_of_finite_differences(name):
    router, x = make(name, dtype=torch.float64), tokens(5, torch.float64).requires_grad_()
    parameters = dict(router.named_parameters())

    def outputs(x, *values):
        routing = torch.func.functional_call(
            router, dict(zip(parameters, values, strict=True)), (x,), {"token_ids": token_ids(5), "mask": MASK[:5]}
        )
        return routing.weights, routing.logits

    values = [value.detach().clone().requires_grad_() for value in parameters.values()]
    assert values
    assert torch.autograd.gradcheck(outputs, (x, *values))


@pytest.mark.parametrize("name", sorted(WITHOUT_PARAMETERS))
def test_routers_without_a_gate_have_no_parameters(name):
    assert not list(make(name).parameters())


@every
def test_every_parameter_learns_from_the_weights(name):
    router = make(name)
    routing = route(router, tokens())
    if not list(router.parameters()):
        assert not routing.weights.requires_grad
        return
    (routing.weights * torch.randn(routing.weights.shape)).sum().backward()
    for parameter in router.parameters():
        assert parameter.grad.abs().sum() > 0


@every
def test_padding_gets_nothing(name):
    routing = route(make(name), tokens(), mask=MASK)
    chosen = routing.asked() < EXPERTS
    assert (routing.index[~MASK][chosen[~MASK]] < 0).all()
    assert (routing.weights[~MASK] == 0).all()
    assert routing.mask is MASK


@pytest.mark.usefixtures("references")
@every
def test_a_mask_of_ones_is_no_mask(name):
    router, x = make(name), tokens(100)
    assert_same(route(router, x, mask=torch.ones(100, dtype=torch.bool)), route(router, x))


@every
def test_padding_is_as_if_it_were_not_there(name):
    router, x = make(name), tokens()
    with_padding = route(router, x, mask=MASK)
    without = router(x[MASK], token_ids=token_ids(TOKENS)[MASK])
    assert torch.equal(with_padding.index[MASK], without.index)
    torch.testing.assert_close(with_padding.weights[MASK], without.weights)
    assert torch.equal(with_padding.tokens_per_expert(), without.tokens_per_expert())
    assert torch.equal(with_padding.dropped(), without.dropped())


@every
@pytest.mark.parametrize("content", [float("nan"), float("inf"), 1e4])
def test_content_of_padding_reaches_nothing(name, content):
    router, x = make(name), tokens()
    ids = token_ids(TOKENS)
    clean = router(x.requires_grad_(), token_ids=ids, mask=MASK)
    dirty_x = torch.where(MASK.unsqueeze(1), x.detach(), content).requires_grad_()
    dirty = router(dirty_x, token_ids=torch.where(MASK, ids, -100), mask=MASK)
    assert torch.equal(dirty.index[MASK], clean.index[MASK])
    assert torch.equal(dirty.weights, clean.weights)
    assert torch.equal(dirty.logits[MASK], clean.logits[MASK])
    if name in WITHOUT_PARAMETERS:
        return
    grad = torch.randn(clean.weights.shape)
    wanted = torch.autograd.grad(clean.weights, (x, *router.parameters()), grad)
    had = torch.autograd.grad(dirty.weights, (dirty_x, *router.parameters()), grad)
    torch.testing.assert_close(had, wanted)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_equals_float32_of_the_same_values(name, dtype):
    low, high = make(name, dtype=dtype), make(name)
    high.load_state_dict(low.state_dict())
    x = tokens().to(dtype)
    assert_same(route(low, x), route(high, x.float()))


@every
def test_autocast_changes_nothing(name):
    router, x = make(name), tokens()
    want = route(router, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = route(router, x)
        assert torch.mm(x, x.t()).dtype is torch.bfloat16, "autocast must go on afterwards"
    assert_same(have, want)


@every
def test_compiles_without_a_break(name):
    router, x, inputs = make(name), tokens(), {"token_ids": token_ids(TOKENS), "mask": MASK}
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager", dynamic=False)
    have, want = compiled(x, **inputs), router(x, **inputs)
    assert torch.equal(have.index, want.index)
    torch.testing.assert_close(parts(have)[1:], parts(want)[1:])


# One of each kind of capacity: a number that follows that of the tokens, none, and a tensor.
@pytest.mark.parametrize("name", ["hash capacity", "learned gated", "dynamic threshold"])
def test_compiles_once_for_any_number_of_tokens(name):
    router = make(name)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (TOKENS, 8):
        have, want = route(compiled, tokens(count)), route(router, tokens(count))
        assert torch.equal(have.index, want.index)
        torch.testing.assert_close(parts(have)[1:], parts(want)[1:])


@every
def test_exports(name):
    router, x = make(name).eval(), tokens()
    inputs = {"token_ids": token_ids(TOKENS), "mask": MASK}
    program = torch.export.export(router, (x,), inputs)
    have, want = program.module()(x, **inputs), router(x, **inputs)
    assert torch.equal(have.index, want.index)
    torch.testing.assert_close(have.weights, want.weights)


@every
def test_meta_device_holds_everything(name):
    router = make(name, device="meta", dtype=torch.bfloat16)
    state = [*router.parameters(), *router.buffers()]
    assert all(tensor.is_meta for tensor in state)
    x = torch.empty(7, HIDDEN, device="meta", dtype=torch.bfloat16)
    routing = route(router, x, mask=MASK[:7].to("meta"))
    assert all(part.is_meta for part in parts(routing))
    assert routing.index.shape == (7, router.top_k)


@every
def test_everything_moves_with_the_module(name):
    router = make(name).to("meta")
    routing = route(router, torch.empty(7, HIDDEN, device="meta"))
    assert all(part.is_meta for part in parts(routing))
    assert not [key for key, value in vars(router).items() if isinstance(value, torch.Tensor)]


@every
def test_made_on_meta_and_reset_it_routes(name):
    router = make(name, device="meta").to_empty(device="cpu")
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.detach().fill_(3)
    router.reset_parameters()
    routing = route(router, tokens())
    assert routing.weights.isfinite().all()
    # Not the constant that it was filled with.
    if name in WITHOUT_PARAMETERS:
        assert torch.equal(router.table, make(name).table)
    else:
        assert routing.logits.std() > 0.1


@every
def test_a_copy_and_a_loaded_state_route_alike(name):
    router, x = make(name), tokens()
    want = route(router, x)
    assert_same(route(copy.deepcopy(router), x), want)
    torch.manual_seed(5)
    other = ROUTERS[name](None, None)
    other.load_state_dict(router.state_dict())
    assert_same(route(other, x), want)


@every
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_weights_sum_to_one_where_they_are_normalised(name, mask):
    router, x = make(name), tokens()
    sums = all_weights(router, x, route(router, x, mask=mask)).sum(-1)
    if name in RENORMALIZED:
        torch.testing.assert_close(sums, torch.ones(TOKENS))
    else:
        assert not torch.allclose(sums, torch.ones(TOKENS), atol=1e-3)


@every
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_no_choice_is_lost(name, mask):
    router = make(name)
    routing = route(router, tokens(), mask=mask)
    counted = int(MASK.sum()) if mask is not None else TOKENS
    rows = routing.index if mask is None else routing.index[mask]
    none = int((rows >= EXPERTS).sum())
    assert routing.tokens_per_expert().sum() + routing.dropped() + none == counted * router.top_k
    assert (none > 0) == getattr(router, "adaptive_top_k", False)
    assert routing.asked_per_expert().sum() == counted * router.top_k - none
    if not router.limited:
        assert routing.dropped() == 0


@pytest.mark.usefixtures("references")
@every
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_replaying_its_own_routing_repeats_it(name, mask):
    router, x = make(name), tokens()
    want = route(router, x, mask=mask)
    assert_same(router(x, mask=mask, replay=want), want)


@every
def test_a_replay_refuses_padding_too(name):
    router, x = make(name), tokens()
    replayed = router(x, mask=MASK, replay=route(router, x))
    assert (replayed.weights[~MASK] == 0).all()
    assert (replayed.tokens_per_expert().sum()) <= MASK.sum() * router.top_k


@gated
def test_a_replay_carries_gradients(name):
    router, x = make(name), tokens()
    recorded = route(router, x)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    replayed = router(x, replay=recorded)
    assert torch.equal(replayed.index, recorded.index)
    assert not torch.equal(replayed.weights, recorded.weights)
    (replayed.weights * torch.randn(replayed.weights.shape)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in router.parameters())


@pytest.mark.parametrize("name", JITTERED)
def test_jitter_is_for_training_alone(name):
    router, x = JITTERED[name](None, None), tokens()
    first, second = route(router, x), route(router, x)
    assert not torch.equal(first.logits, second.logits)
    router.eval()
    assert_same(route(router, x), route(router, x))
    torch.testing.assert_close(route(router, x).logits, router.gate(x))


@every
def test_prints_its_sizes(name):
    router = make(name)
    shown = repr(router)
    assert shown.startswith(f"{type(router).__name__}({HIDDEN}, num_experts={EXPERTS}, top_k={router.top_k}")
    assert "\n" not in shown


@every
def test_the_same_choices_print_the_same_and_others_otherwise(name):
    others = {repr(make(other)) for other in ROUTERS if other != name}
    assert repr(make(name)) == repr(make(name))
    assert repr(make(name)) not in others


@every
def test_a_replay_of_another_model_or_batch_is_refused(name):
    router, x = make(name), tokens()
    recorded = route(router, x)
    more = Routing(recorded.index, recorded.weights, torch.zeros(TOKENS, EXPERTS + 1), None, recorded.token)
    with pytest.raises(InputError, match=f"is of {TOKENS} tokens and {EXPERTS + 1} experts"):
        route(router, x, replay=more)
    with pytest.raises(InputError, match=f"is of {TOKENS} tokens and {EXPERTS} experts, x of {TOKENS + 1}"):
        route(router, tokens(TOKENS + 1), replay=recorded)
