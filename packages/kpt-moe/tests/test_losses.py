import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError, UnknownNameError
from kpt_moe import Routing
from kpt_moe.losses import (
    SCORES,
    GlobalLoad,
    entropy_loss,
    global_batch_loss,
    gshard_loss,
    sequence_loss,
    switch_loss,
    z_loss,
)
from kpt_moe.routers import ROUTERS
from routings import routing_from_logits

TOKENS, EXPERTS, TOP_K = 12, 5, 2
#: Unequal sequences, an empty one among them.
CU_SEQLENS = torch.tensor([0, 3, 3, 8, 12], dtype=torch.int32)
LOSSES = {
    "switch": switch_loss,
    "gshard": gshard_loss,
    "global": lambda routings, **options: global_batch_loss(routings, load=GlobalLoad(), **options),
    "entropy": entropy_loss,
    "token_entropy": partial(entropy_loss, per_token=True),
    "z": z_loss,
    "sequence": partial(sequence_loss, cu_seqlens=CU_SEQLENS),
}
SCORED = {name: loss for name, loss in LOSSES.items() if name != "z"}


def make(masked=False, dtype=torch.float64, experts=EXPERTS) -> Routing:
    """A routing with refused choices of two kinds, and one choice that is none."""
    logits = (2 * torch.randn(TOKENS, experts, dtype=dtype)).requires_grad_()
    routing = routing_from_logits(logits, top_k=TOP_K)
    index = routing.index.clone()
    index[0, 0], index[4, 1] = ~index[0, 0], experts
    mask = None
    if masked:
        mask = torch.rand(TOKENS) > 0.4
        mask[:2] = torch.tensor([True, False])
        index = torch.where(mask[:, None] | (index >= experts), index, torch.where(index < 0, index, ~index))
    return Routing(index, routing.weights, logits, mask)


def probabilities(row: list[float], score: str) -> list[float]:
    scores = {
        "softmax": math.exp,
        "softmax_after": math.exp,
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "sqrtsoftplus": lambda v: math.sqrt(math.log1p(math.exp(v))),
    }
    parts = [scores[score](v) for v in row]
    return [part / sum(parts) for part in parts]


def expected(name: str, routings: list[Routing], score: str = "softmax") -> float:
    """The published formulas, token by token, with the share in all choices for the choices per token."""
    experts, top_k = routings[0].num_experts, routings[0].top_k
    tokens = []  # (sequence, logits, asked), of all layers
    for layer, routing in enumerate(routings):
        rows = zip(routing.logits.tolist(), routing.index.tolist(), strict=True)
        for t, (logits, ids) in enumerate(rows):
            if routing.mask is None or routing.mask[t]:
                sequence = sum(t >= end for end in CU_SEQLENS.tolist()[1:])
                tokens.append(((layer, sequence), logits, [~e if e < 0 else e for e in ids]))

    def balance(some, choices):
        mean = [sum(probabilities(row, score)[e] for _, row, _ in some) / len(some) for e in range(experts)]
        asked = [sum(ids[:choices].count(e) for _, _, ids in some) for e in range(experts)]
        return mean, experts * sum(p * f for p, f in zip(mean, asked, strict=True)) / max(sum(asked), 1)

    def entropy(p):
        return -sum(v * math.log(v) for v in p)

    if not tokens:
        return 0.0
    mean, product = balance(tokens, top_k)
    if name in ("switch", "global"):
        return product
    if name == "gshard":
        return balance(tokens, 1)[1]
    if name == "entropy":
        return math.log(experts) - entropy(mean)
    if name == "token_entropy":
        return math.log(experts) - sum(entropy(probabilities(row, score)) for _, row, _ in tokens) / len(tokens)
    if name == "z":
        return sum(math.log(sum(math.exp(v) for v in row)) ** 2 for _, row, _ in tokens) / len(tokens)
    groups = sorted({sequence for sequence, _, _ in tokens})
    each = [balance([t for t in tokens if t[0] == g], top_k)[1] for g in groups]
    return sum(each) / len(each)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", LOSSES)
def test_is_the_published_formula(name, score, masked, layers):
    routings = [make(masked) for _ in range(layers)]
    options = {"score": score} if name in SCORED else {}
    loss = LOSSES[name](routings if layers > 1 else routings[0], **options)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected(name, routings, score), rel=1e-12, abs=1e-14)
    scored = [replace(routing, score=score) for routing in routings]
    assert torch.equal(LOSSES[name](scored), loss), "the routing says how it was scored"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_value(name, score, masked):
    routing = make(masked)
    options = {"score": score} if name in SCORED else {}

    def loss(logits):
        return LOSSES[name](Routing(routing.index, routing.weights, logits, routing.mask), **options)

    assert torch.autograd.gradcheck(loss, (routing.logits.detach().requires_grad_(),))
    (gradient,) = torch.autograd.grad(loss(routing.logits), routing.logits)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_padding_counts_nowhere_whatever_it_holds(name):
    routing = make(masked=True)
    want = torch.autograd.grad(LOSSES[name](routing), routing.logits)[0]
    poisoned = routing.logits.detach().clone()
    poisoned[~routing.mask] = float("nan")
    poisoned.requires_grad_()
    loss = LOSSES[name](Routing(routing.index, routing.weights, poisoned, routing.mask))
    assert torch.equal(loss, LOSSES[name](routing))
    (have,) = torch.autograd.grad(loss, poisoned)
    assert torch.equal(have, want)
    assert have[~routing.mask].abs().sum() == 0


@pytest.mark.parametrize("case", ["all masked", "no tokens"])
@pytest.mark.parametrize("name", LOSSES)
def test_without_tokens_that_count_loss_and_gradient_are_zero(name, case):
    if case == "all masked":
        logits, mask = torch.randn(TOKENS, EXPERTS, requires_grad=True), torch.zeros(TOKENS, dtype=torch.bool)
    else:
        logits, mask = torch.randn(0, EXPERTS, requires_grad=True), None
    options = {"cu_seqlens": torch.zeros(1, dtype=torch.int32)} if (name, case) == ("sequence", "no tokens") else {}
    loss = LOSSES[name](routing_from_logits(logits, top_k=TOP_K, mask=mask), **options)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.parametrize("name", LOSSES)
def test_closed_experts_and_extreme_logits_give_finite_gradients(name):
    logits = torch.randn(TOKENS, EXPERTS)
    logits[:, 0], logits[1, 1] = torch.finfo(torch.float32).min, 1e4
    logits.requires_grad_()
    loss = LOSSES[name](routing_from_logits(logits, top_k=TOP_K))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[:, 0].abs().sum() == 0


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("name", LOSSES)
def test_is_float32_or_float64(name, dtype, wide):
    logits = torch.randn(TOKENS, EXPERTS).to(dtype)
    routing = Routing(torch.randint(EXPERTS, (TOKENS, TOP_K)), torch.rand(TOKENS, TOP_K), logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](routing)
    assert loss.dtype is wide
    torch.testing.assert_close(
        loss, LOSSES[name](Routing(routing.index, routing.weights, logits.double())).to(wide), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "balance", "collapse"),
    [("switch", 1, 0), ("global", 1, 0), ("gshard", 1, 0), ("sequence", 1, 0), ("entropy", 0, None)],
)
@pytest.mark.parametrize("experts", [4, 6])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_scale_is_one_for_any_number_of_choices_and_experts(name, balance, collapse, top_k, experts):
    index = (torch.arange(experts).unsqueeze(1) + torch.arange(top_k)).remainder(experts).repeat(3, 1)
    tokens = index.shape[0]
    routing = Routing(index, torch.rand(tokens, top_k), torch.zeros(tokens, experts, dtype=torch.float64))
    options = {"cu_seqlens": torch.tensor([0, experts, tokens])} if name == "sequence" else {}
    assert LOSSES[name](routing, **options).item() == pytest.approx(balance, abs=1e-12)
    sure = torch.zeros(tokens, experts, dtype=torch.float64)
    sure[:, 1] = 100
    gone = Routing(torch.ones(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), sure)
    collapse = math.log(experts) if collapse is None else experts
    assert LOSSES[name](gone, **options).item() == pytest.approx(collapse, rel=1e-9)


@pytest.mark.parametrize("router", ["gshard", "dynamic_capacity", "expert_choice"])
def test_balance_is_one_whatever_the_number_of_choices(router):
    """Of routers that give tokens fewer or more choices than `top_k`: equal probabilities have loss 1."""
    made = ROUTERS[router](8, num_experts=4, top_k=2)
    torch.nn.init.zeros_(made.weight)
    routing = made(torch.randn(30, 8))
    assert switch_loss(routing).item() == pytest.approx(1, abs=1e-6)
    assert sequence_loss(routing, batch_size=3).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_with_nan_that_counts_makes_the_loss_nan(name):
    routing = make()
    logits = routing.logits.detach().clone()
    logits[3] = float("nan")
    assert LOSSES[name](replace(routing, logits=logits)).isnan()
    mask = torch.arange(TOKENS) != 3
    assert LOSSES[name](replace(routing, logits=logits, mask=mask)).isfinite()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_transformers(masked, layers):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    gates = tuple(torch.randn(6, EXPERTS, requires_grad=True) for _ in range(layers))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]) if masked else None
    want = load_balancing_loss_func(gates, EXPERTS, TOP_K, mask)
    have = switch_loss([routing_from_logits(gate, top_k=TOP_K, mask=mask) for gate in gates])
    have = TOP_K * have  # the documented factor
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(torch.autograd.grad(have, gates), torch.autograd.grad(want, gates))


def test_sequences_of_one_length_are_those_of_cu_seqlens():
    routing = make(masked=True)
    want = sequence_loss(routing, cu_seqlens=torch.tensor([0, 4, 8, 12]))
    torch.testing.assert_close(sequence_loss(routing, batch_size=3), want, rtol=0, atol=0)


def test_tokens_beyond_cu_seqlens_are_padding():
    routing = make()
    some = Routing(routing.index[:8], routing.weights[:8], routing.logits[:8])
    have = sequence_loss(routing, cu_seqlens=CU_SEQLENS[:4])
    torch.testing.assert_close(have, sequence_loss(some, cu_seqlens=CU_SEQLENS[:4]))
    assert torch.autograd.grad(have, routing.logits)[0][8:].abs().sum() == 0


def test_experts_that_choose_tokens_are_counted_by_the_tokens():
    logits = torch.randn(4, 2, dtype=torch.float64)
    index, token = torch.tensor([[0], [0], [1], [1]]), torch.tensor([3, 1, 3, 0])
    routing = Routing(index, torch.rand(4, 1), logits, torch.tensor([True, True, True, False]), token)
    p = logits[:3].softmax(-1).mean(0)
    torch.testing.assert_close(switch_loss(routing), 2 * (1 / 2 * p[0] + 1 / 2 * p[1]))
    torch.testing.assert_close(
        sequence_loss(routing, batch_size=4), 2 * (logits[0, :].softmax(-1)[1] + logits[1, :].softmax(-1)[0]) / 2
    )
    with pytest.raises(InputError, match="gshard_loss: a token has no first choice where experts choose tokens"):
        gshard_loss(routing)


def test_global_load_counts_over_micro_batches():
    first, second = make(masked=True), make()
    load = GlobalLoad()
    assert global_batch_loss(first, load=load).item() == pytest.approx(expected("switch", [first]))
    have = global_batch_loss(second, load=load)
    asked = first.asked_per_expert() + second.asked_per_expert()
    assert torch.equal(load.asked, asked)
    torch.testing.assert_close(have, EXPERTS * (asked / asked.sum() * second.logits.softmax(-1).mean(0)).sum())
    load.reset()
    torch.testing.assert_close(global_batch_loss(second, load=load), switch_loss(second))


def test_global_load_counts_what_checkpointing_repeats_once():
    load, logits = GlobalLoad(), torch.randn(9, EXPERTS, dtype=torch.float64, requires_grad=True)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return global_batch_loss(routing_from_logits(logits, top_k=2), load=load)

    for count in (18, 36):
        have = checkpoint(loss, logits, use_reentrant=False)
        have.backward()
        assert load.asked.sum() == count


def test_all_compile_without_a_break():
    routing = make(masked=True, dtype=torch.float32)
    routing = Routing(routing.index, routing.weights.detach(), routing.logits, routing.mask)

    def losses(routings):
        return torch.stack([loss(routings) for loss in LOSSES.values()])

    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    have, want = compiled([routing, routing]), losses([routing, routing])
    torch.testing.assert_close(have, want)
    grads = [torch.autograd.grad(loss.square().sum(), routing.logits)[0] for loss in (have, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", LOSSES)
def test_runs_on_meta(name):
    routing = make(masked=True)
    on_meta = Routing(*(t.to("meta") for t in (routing.index, routing.weights, routing.logits, routing.mask)))
    options = {"cu_seqlens": CU_SEQLENS.to("meta")} if name == "sequence" else {}
    assert LOSSES[name](on_meta, **options).device.type == "meta"


@pytest.mark.parametrize("name", LOSSES)
def test_routings_of_different_experts_or_none_are_refused(name):
    with pytest.raises(InputError, match=r"got 2 of \[4, 5\] experts"):
        LOSSES[name]([make(), make(experts=4)])
    with pytest.raises(InputError, match=r"got 0 of \[\] experts"):
        LOSSES[name]([])


@pytest.mark.parametrize("name", SCORED)
def test_unknown_score_is_named(name):
    with pytest.raises(UnknownNameError, match="unknown score 'sigmoide': did you mean 'sigmoid'"):
        SCORED[name](make(), score="sigmoide")


def test_wrong_sequences_are_named():
    for options in ({}, {"cu_seqlens": CU_SEQLENS, "batch_size": 2}):
        with pytest.raises(InputError, match="give either cu_seqlens or batch_size"):
            sequence_loss(make(), **options)
    with pytest.raises(InputError, match="12 tokens are not 5 sequences of one length"):
        sequence_loss(make(), batch_size=5)


def test_global_load_names_misuse():
    load = GlobalLoad()
    with pytest.raises(InputError, match="nothing is counted yet"):
        _ = load.asked
    load.add(make())
    with pytest.raises(InputError, match="counts 5 experts; got a routing of 4"):
        load.add(make(experts=4))
