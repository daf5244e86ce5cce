"""A token with NaN or infinity changes nobody else's result: for the others it is as if it were padding."""

import pytest
import torch

from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.expert_networks import (
    AttentionExpert,
    ConvolutionalExpert,
    FeedForwardExpert,
    ParameterEfficientExpert,
    QuantizedFeedForwardExpert,
)
from kpt_moe.layers import LAYERS, create_moe_layer
from kpt_moe.routers import ROUTERS as KINDS
from kpt_moe.routers import Router
from kpt_moe.routing import Routing

HIDDEN, EXPERTS, TOKENS, BAD = 8, 4, 24, 5
SIZES = {"hidden_size": HIDDEN, "num_experts": EXPERTS}
TIGHT = {"capacity_factor": 0.6}
#: Arguments of a kind of router, for each behaviour in which a token might reach another.
ROUTERS = {
    "top_k": ("top_k", {"top_k": 2}),
    "top_k sigmoid": ("top_k", {"top_k": 2, "score": "sigmoid", "correction_bias": True, "num_groups": 2}),
    "top_k softmax_after": ("top_k", {"top_k": 2, "score": "softmax_after"}),
    "top_k capacity": ("top_k", {"top_k": 2, **TIGHT}),
    "top_k sigmoid capacity": ("top_k", {"top_k": 2, "score": "sigmoid", "priority": "weight", **TIGHT}),
    "top_k capacity jitter": ("top_k", {"top_k": 2, "jitter": 0.2, **TIGHT}),
    "learned": ("learned", {"top_k": 2, **TIGHT}),
    "switch": ("switch", {"eval_capacity_factor": 0.7}),
    "gshard": ("gshard", TIGHT),
    "hash": ("hash", {"vocab_size": 50, "top_k": 2, **TIGHT}),
    "hash learned": ("hash", {"vocab_size": 50, "top_k": 2, "learned_weights": True, **TIGHT}),
    "dynamic": ("dynamic_capacity", {"min_capacity_factor": 0.4, "max_capacity_factor": 1.5}),
    "dynamic adaptive": ("dynamic_capacity", {"adaptive_top_k": True}),
    "expert_choice": ("expert_choice", {"top_k": 2}),
}
POISON = [float("nan"), float("inf"), float("-inf")]

every_poison = pytest.mark.parametrize("poison", POISON, ids=str)


def poisoned(x: torch.Tensor, poison: float, *place: int, everywhere: bool = True) -> torch.Tensor:
    x = x.clone()
    x[(*place, slice(None) if everywhere else 3)] = poison
    return x


def make(name: str) -> Router:
    kind, options = ROUTERS[name]
    return KINDS[kind](**SIZES, **options, dtype=torch.float64)


def run(router: Router, network, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, Routing]:
    torch.manual_seed(3)  # GShard's second expert, and jitter
    routing = router(x, mask=mask, token_ids=torch.arange(TOKENS) * 7 % 50)
    return network(x, routing), routing


def test_every_kind_of_router_is_here():
    assert {kind for kind, _ in ROUTERS.values()} == set(KINDS)


@pytest.mark.parametrize("everywhere", [True, False], ids=["whole", "one"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
@every_poison
def test_routers(name, poison, training, masked, everywhere):
    router = make(name).train(training)
    network = FeedForwardExpert(**SIZES, intermediate_size=6, bias=True, dtype=torch.float64)
    torch.nn.init.normal_(network.down_proj_bias)
    x, others = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.arange(TOKENS) != BAD
    mask = torch.arange(TOKENS) % 6 != 1 if masked else None
    have, routing = run(router, network, poisoned(x, poison, BAD, everywhere=everywhere), mask)
    want, _ = run(router, network, x, others if mask is None else others & mask)
    if name == "hash":  # without a gate nobody knows; the token keeps the place that its id has
        want, _ = run(router, network, x, mask)
    torch.testing.assert_close(have[others], want[others], rtol=1e-12, atol=1e-12)
    if poison != poison or routing.token is not None:
        assert have[BAD].isnan().all()
    elif (routing.index[BAD] >= 0).any():  # but for one that its id gives no place
        assert not have[BAD].isfinite().any()
    assert have[others].isfinite().all()
    assert (routing.mask is None) == (mask is None), "it is not padding: a loss of such a batch is NaN"


@every_poison
def test_bits_stay_too_where_bits_do_not_depend_on_the_batch(poison):
    router, x = make("top_k capacity"), torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    network = FeedForwardExpert(**SIZES, intermediate_size=6, dtype=torch.float64)
    others = torch.arange(TOKENS) != BAD
    with batch_invariant():
        have, _ = run(router, network, poisoned(x, poison, BAD), None)
        want, _ = run(router, network, x, others)
    assert torch.equal(have[others], want[others])


def _quantised(**options) -> QuantizedFeedForwardExpert:
    experts = FeedForwardExpert(**SIZES, intermediate_size=6, **options)
    return QuantizedFeedForwardExpert.from_feed_forward(experts)


def _adapted(**options) -> ParameterEfficientExpert:
    return ParameterEfficientExpert.from_feed_forward(FeedForwardExpert(**SIZES, intermediate_size=6, **options))


WIDE = {**SIZES, "intermediate_size": 6}
NETWORKS = {
    "feed forward": lambda **o: FeedForwardExpert(**WIDE, **o),
    "plain": lambda **o: FeedForwardExpert(**WIDE, activation="gelu", bias=True, **o),
    "quantised": _quantised,
    "lora": lambda **o: ParameterEfficientExpert(**WIDE, **o),
    "adapter": lambda **o: ParameterEfficientExpert(**WIDE, mode="adapter", bias=True, **o),
    "lora on experts": _adapted,
    "convolutional": lambda **o: ConvolutionalExpert(**WIDE, bias=True, **o),
    "convolutional both ways": lambda **o: ConvolutionalExpert(**WIDE, causal=False, kernel_size=4, **o),
    "attention": lambda **o: AttentionExpert(**SIZES, head_dim=4, num_heads=2, bias=True, **o),
    "attention both ways": lambda **o: AttentionExpert(**SIZES, head_dim=4, causal=False, **o),
}
#: Tokens before and after it in its sequence to which a poisoned one may be NaN.
REACH = {
    "convolutional": (0, 2),
    "convolutional both ways": (2, 1),
    "attention": (0, TOKENS),
    "attention both ways": (TOKENS, TOKENS),
}


@pytest.mark.parametrize("chosen", [False, True], ids=["tokens choose", "experts choose"])
@pytest.mark.parametrize("ends", [None, (0, 4, 4, 11, 24)], ids=["one sequence", "packed"])
@pytest.mark.parametrize("name", NETWORKS)
@every_poison
def test_networks(name, poison, ends, chosen):
    network = NETWORKS[name](dtype=torch.float64)
    for parameter in network.parameters():
        if parameter.is_floating_point() and parameter.dtype is torch.float64:
            torch.nn.init.normal_(parameter)
    router = make("expert_choice" if chosen else "top_k")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    clean, dirty = (router(t) for t in (x, poisoned(x, poison, BAD)))
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    if not chosen:  # the same choices, so that the networks alone are asked
        dirty = Routing(
            clean.index,
            torch.where(torch.arange(TOKENS).unsqueeze(1) == BAD, dirty.weights, clean.weights),
            dirty.logits,
        )
    else:
        clean = router(x, mask=torch.arange(TOKENS) != BAD)
    have = network(poisoned(x, poison, BAD), dirty, cu_seqlens=cu_seqlens)
    want = network(x, clean, cu_seqlens=cu_seqlens)
    before, after = REACH.get(name, (0, 0))
    start, end = (0, TOKENS) if ends is None else (4, 11)
    reached = torch.zeros(TOKENS, dtype=torch.bool)
    reached[max(BAD - before, start) : min(BAD + after + 1, end)] = True
    torch.testing.assert_close(have[~reached], want[~reached], rtol=1e-12, atol=1e-12)
    assert have[BAD].isnan().all()
    served = torch.zeros(TOKENS).index_add(
        0, torch.arange(TOKENS) if dirty.token is None else dirty.token, (dirty.index < EXPERTS).sum(1).float()
    )
    assert not have[reached & (served > 0)].isfinite().any(), "a token that looks at it must not get a number for that"


@pytest.mark.parametrize("expert", ["feed_forward", "convolutional", "attention", "parameter_efficient"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@every_poison
def test_layers(kind, poison, training, expert):
    shared = {"num_shared_experts": 1, "intermediate_size": 6, "shared_gate": True}
    layer = create_moe_layer(kind, **SIZES, expert=expert, **shared, dtype=torch.float64).train(training)
    x, others = torch.randn(3, 7, HIDDEN, dtype=torch.float64), torch.ones(3, 7, dtype=torch.bool)
    others[1, 2] = False

    def outputs(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        torch.manual_seed(3)
        return layer(x, mask=mask)

    have, want = outputs(poisoned(x, poison, 1, 2), None), outputs(x, others)
    if layer.experts.needs_sequences:
        others[1, 2:] = False
    torch.testing.assert_close(have[others], want[others], rtol=1e-12, atol=1e-12)
    assert not have[1, 2].isfinite().any()


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_train_on_what_is_left(kind):
    """Gradients of the other tokens' inputs are finite, and those of the batch without the poisoned one."""
    layer = create_moe_layer(kind, **SIZES, dtype=torch.float64)
    x, others = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.arange(TOKENS) != BAD

    def gradient(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        torch.manual_seed(3)
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(layer(x, mask=mask)[others].square().sum(), x)
        return found[others]

    torch.testing.assert_close(gradient(poisoned(x, float("nan"), BAD), None), gradient(x, others))
