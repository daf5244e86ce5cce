import copy
import json
import math
import pickle
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from families import FAMILIES, VOCABULARY
from kpt_core import InputError
from kpt_moe import Routing, TopKRouter
from kpt_moe.routers import Router
from kpt_moe.routing_trace import record_routing
from kpt_moe.statistics import RouterStatistics, RouterSummary

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

HIDDEN, EXPERTS, TOP_K = 8, 5, 2


class Routers(nn.Module):
    """Two routers; what they weigh is all that comes out."""

    def __init__(self, **choices) -> None:
        super().__init__()
        self.first = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
        self.second = TopKRouter(HIDDEN, num_experts=EXPERTS + 1, top_k=1, **choices)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.first(x, mask=mask).weights.sum() + self.second(x.tanh(), mask=mask).weights.square().sum()


def expected(routings: list[Routing]) -> RouterSummary:
    """Choice by choice, from the definitions."""
    experts = routings[0].num_experts
    load, asked, dropped, tokens = [0] * experts, [0] * experts, 0, 0
    for routing in routings:
        mask = torch.ones(len(routing.logits)).bool() if routing.mask is None else routing.mask
        tokens += sum(mask.tolist())
        for row, ids in enumerate(routing.index.tolist()):
            counts = mask[row if routing.token is None else routing.token[row]]
            for e in ids:
                wanted = ~e if e < 0 else e
                load[wanted] += e >= 0
                asked[wanted] += int(counts)
                dropped += int(e < 0 and counts)
    total = sum(asked)
    share = tuple(count / total for count in asked)
    return RouterSummary(
        tokens=tokens,
        load=tuple(load),
        asked=tuple(asked),
        dropped=dropped,
        share=share,
        imbalance=pytest.approx(max(asked) / (total / experts)),
        dropped_share=pytest.approx(dropped / total),
        entropy=pytest.approx(-sum(p * math.log(p) for p in share if p > 0)),
        dead=tuple(e for e in range(experts) if asked[e] == 0),
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_summaries_are_the_definition(training, masked):
    model = Routers(capacity_factor=0.7).train(training)
    batches = [(torch.randn(n, HIDDEN), torch.rand(n) < 0.6 if masked else None) for n in (3, 40)]
    with RouterStatistics(model) as statistics:
        for x, mask in batches:
            model(x, mask)
    routings = {
        "first": [model.first(x, mask=mask) for x, mask in batches],
        "second": [model.second(x.tanh(), mask=mask) for x, mask in batches],
    }
    have = statistics.snapshot()
    assert have == {path: expected(found) for path, found in routings.items()}
    assert have["second"].dropped > 0


class Chosen(Router):
    """Experts choose tokens, always the same ones."""

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.num_experts]

    def choose(self, logits, scores, mask, token_ids):
        token = torch.tensor([0, 0, 2], device=logits.device)
        return torch.tensor([[1], [3], [1]], device=logits.device), token


def test_experts_that_choose_tokens_are_counted_by_rows_and_tokens_by_themselves():
    router = Chosen(HIDDEN, num_experts=EXPERTS, top_k=1)
    batches = [(torch.randn(4, HIDDEN), mask) for mask in (None, torch.tensor([True, False, False, True]))]
    with RouterStatistics(router) as statistics:
        for x, mask in batches:
            router(x, mask=mask)
    summary = statistics.snapshot()[""]
    assert summary == expected([router(x, mask=mask) for x, mask in batches])
    assert summary.tokens == 4 + 2
    assert summary.asked == (0, 3, 0, 2, 0)


def test_nothing_counted_is_zeros():
    summary = RouterStatistics(Routers()).snapshot()["first"]
    assert summary == RouterSummary(0, (0,) * 5, (0,) * 5, 0, (0.0,) * 5, 0.0, 0.0, 0.0, (0, 1, 2, 3, 4))
    assert math.copysign(1, summary.entropy) == 1


def test_a_collapsed_router_shows():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=1)
    nn.init.zeros_(router.weight)
    with RouterStatistics(router) as statistics:
        router(torch.randn(9, HIDDEN))
    summary = statistics.snapshot()[""]
    assert summary.imbalance == EXPERTS
    assert summary.entropy == 0
    assert len(summary.dead) == EXPERTS - 1


def test_summaries_are_plain_numbers():
    model = Routers()
    with RouterStatistics(model) as statistics:
        model(torch.randn(4, HIDDEN))
    assert (
        json.loads(json.dumps({path: asdict(s) for path, s in statistics.snapshot().items()}))["first"]["tokens"] == 4
    )


def test_reset_starts_anew_and_detach_stops():
    model, x = Routers(), torch.randn(4, HIDDEN)
    statistics = RouterStatistics(model)
    model(x)
    statistics.reset()
    model(x[:3])
    assert statistics.snapshot()["first"].tokens == 3
    statistics.detach()
    statistics.detach()
    model(x)
    assert statistics.snapshot()["first"].tokens == 3
    assert not any(module._forward_hooks for module in model.modules())


def test_neither_the_state_nor_the_buffers_of_the_model_change():
    model = Routers()
    before = list(model.state_dict()), list(model.named_buffers())
    with RouterStatistics(model):
        assert (list(model.state_dict()), list(model.named_buffers())) == before


def test_counts_survive_other_dtypes_inference_mode_and_a_copy():
    model, x = Routers(), torch.randn(4, HIDDEN)
    with RouterStatistics(model) as statistics:
        with torch.inference_mode():
            model(x)
        model.half()(x.half())
        twin = copy.deepcopy(model)
        twin(x.half())
        pickle.loads(pickle.dumps(model))(x.half())
        model.double()(x.double())
    assert statistics.snapshot()["first"].tokens == 12


def test_a_model_without_routers_is_refused():
    with pytest.raises(InputError, match=r"Linear has neither a kpt_moe\.routers\.Router"):
        RouterStatistics(nn.Linear(2, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_counted_as_their_experts_are_told(family):
    model = FAMILIES[family].build()
    ids = torch.randint(3, VOCABULARY, (2, 9))
    with torch.inference_mode(), record_routing(model) as trace:
        model(ids)
    with torch.inference_mode(), RouterStatistics(model) as statistics:
        model(ids)
        model(ids)
    have = statistics.snapshot()
    assert have.keys() == trace.calls.keys()
    for path, (routing,) in trace.calls.items():
        experts = model.get_submodule(path).num_experts
        asked = tuple(2 * routing.index.flatten().tolist().count(e) for e in range(experts))
        assert have[path].asked == have[path].load == asked
        assert (have[path].tokens, have[path].dropped) == (2 * ids.numel(), 0)
        assert have[path].imbalance == pytest.approx(max(asked) * experts / sum(asked))
    assert not any(module._forward_hooks for module in model.modules())


class Told(nn.Module):
    """The marks of an experts module of transformers, and a call of it."""

    has_gate = has_bias = is_transposed = is_concatenated = True

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.config = type("Config", (), {"_experts_implementation": "eager"})()
        self.num_experts = num_experts

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return x * top_k_weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_experts_that_are_told_no_choice_do_not_count_it(named, compiled):
    model = Told(3)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    # 3 is what expert parallelism tells of the experts of other ranks.
    index, weights = torch.tensor([[0, 3], [2, 0]], dtype=torch.int32), torch.ones(2, 2)
    arguments = {"top_k_index": index, "top_k_weights": weights}
    run(torch.ones(2, 1), index, weights)
    with RouterStatistics(model) as statistics:
        run(torch.ones(2, 1), **arguments) if named else run(torch.ones(2, 1), index, weights)
    assert statistics.snapshot()[""].asked == (2, 0, 1)
    assert statistics.snapshot()[""].tokens == 2


class Layer(nn.Module):
    """One router, for what compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.router(x, mask=mask).weights.square().sum()


@pytest.mark.parametrize(("masked", "dynamic"), [pytest.param(False, False, marks=slow), (True, True)])
def test_compiled_models_are_counted_also_if_compiled_before(masked, dynamic):
    model = Layer()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x, mask = torch.randn(11, HIDDEN), torch.rand(11) < 0.6 if masked else None
    for n in (11, 7):  # all that is called below is compiled by then, without hooks
        compiled(x[:n], None if mask is None else mask[:n])
    with RouterStatistics(model) as statistics:
        for n in (11, 7):
            compiled(x[:n], None if mask is None else mask[:n]).backward()
    with RouterStatistics(model) as plain:
        for n in (11, 7):
            model(x[:n], None if mask is None else mask[:n])
    assert statistics.snapshot() == plain.snapshot()
    assert statistics.snapshot()["router"].tokens > 0


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", ["nothing", "inside", "outside"])
def test_what_checkpointing_repeats_is_not_counted_again(compiled, reentrant):
    model, x = Layer(), torch.randn(11, HIDDEN, requires_grad=True)
    inner = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled == "inside" else model
    run = Checkpointed(inner, reentrant)
    if compiled == "outside":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    calls = []
    if compiled == "nothing":
        model.router.register_forward_hook(lambda *args: calls.append(1))
    with RouterStatistics(model) as statistics:
        for _ in range(2):
            run(x).backward()
    if compiled == "nothing":
        assert len(calls) == 4, "the forward must be repeated for this test to say anything"
    with RouterStatistics(model) as plain:
        model(x)
        model(x)
    assert statistics.snapshot() == plain.snapshot()


def test_counts_follow_the_tokens_to_their_device():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    with RouterStatistics(router) as statistics:
        router.to("meta")(torch.randn(4, HIDDEN, device="meta"))
    assert all(counter.total.is_meta for counter in statistics._counters.values())
