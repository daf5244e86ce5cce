import copy
import json
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from families import FAMILIES, VOCABULARY
from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer, Routing, TopKRouter
from kpt_moe.routing_trace import RoutingTrace, record_routing, replay_routing
from routings import assert_same, routings

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


class Stack(nn.Module):
    """Two layers with residuals; the second may refuse choices."""

    def __init__(self, capacity_factor: float | None = 1.0) -> None:
        super().__init__()
        config = MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, intermediate_size=8)
        limited = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, capacity_factor=capacity_factor)
        self.layers = nn.ModuleList([MoELayer(config), MoELayer(config, router=limited)])
        self.checkpointing: bool | None = None
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointing)
        return x


PATHS = ["layers.0.router", "layers.1.router"]


def perturbed(model: nn.Module) -> nn.Module:
    """The model as a training engine with other numerics sees it: weights rounded to bfloat16."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.bfloat16())
    return other


def has_hooks(model: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("references")
def test_records_each_decision_by_path_and_call():
    model, xs = Stack(), [torch.randn(n, HIDDEN) for n in (5, 3)]
    want: dict[str, list[Routing]] = {path: [] for path in PATHS}
    with torch.no_grad():
        for x in xs:
            for path, layer in zip(PATHS, model.layers, strict=True):
                want[path].append(layer.route(x))
                x = x + layer(x)
    with record_routing(model, logits=True) as trace:
        for x in xs:
            model(x)
    assert list(trace.calls) == PATHS
    for path in PATHS:
        for have, expected in zip(trace.calls[path], want[path], strict=True):
            assert_same(have, expected)
    assert not has_hooks(model)
    model(xs[0])
    assert len(trace.calls[PATHS[0]]) == 2


def test_logits_are_kept_on_demand_alone_and_nothing_carries_gradients():
    model, x = Stack(), torch.randn(5, HIDDEN)
    with record_routing(model) as trace:
        model(x)
    routing = trace.calls[PATHS[0]][0]
    assert routing.logits.shape == (0, EXPERTS)
    assert not routing.weights.requires_grad


def test_keeps_the_trace_where_asked():
    model = Stack()
    with record_routing(model, device="meta") as trace:
        model(torch.randn(5, HIDDEN))
    assert all(r.index.is_meta and r.weights.is_meta for calls in trace.calls.values() for r in calls)


def test_a_recorded_decision_is_a_copy():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    with record_routing(router) as trace:
        routing = router(torch.randn(4, HIDDEN))
    before = routing.index.clone()
    routing.index.fill_(0)
    assert torch.equal(trace.calls[""][0].index, before)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([torch.float32, torch.float64])).flatmap(
            lambda of_path: st.lists(routings(num_experts=of_path[0], dtype=of_path[1]), max_size=4)
        ),
        max_size=3,
    )
)
def test_what_was_saved_is_loaded(calls):
    trace = RoutingTrace({f"layer.{n}/\u00e9": of_path for n, of_path in enumerate(calls)})
    with tempfile.TemporaryDirectory() as folder:
        trace.save(f"{folder}/trace")
        loaded = RoutingTrace.load(f"{folder}/trace")
    assert list(loaded.calls) == list(trace.calls)
    for path in trace.calls:
        for have, want in zip(loaded.calls[path], trace.calls[path], strict=True):
            assert_same(have, want)


def test_many_calls_cost_a_few_tensors(tmp_path):
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    with record_routing(router) as trace:
        for _ in range(50):
            router(torch.randn(1, HIDDEN))
    trace.save(tmp_path / "trace")
    with safe_open(tmp_path / "trace", "pt") as file:
        assert sorted(file.keys()) == ["0.index", "0.logits", "0.sizes", "0.weights"]
        assert file.get_slice("0.index").get_dtype() == "I16"


@pytest.mark.parametrize("paths", ["no json", "3", json.dumps(["a", "b"])])
def test_a_trace_with_damaged_paths_is_refused(tmp_path, paths):
    metadata = {"format": "kpt.routing", "version": "1", "paths": paths}
    save_file({"0.sizes": torch.zeros(0, 7).long()}, tmp_path / "t", metadata)
    with pytest.raises(InputError, match="damaged"):
        RoutingTrace.load(tmp_path / "t")


def differ(a: RoutingTrace, b: RoutingTrace) -> bool:
    pairs = ((r, s) for path in a.calls for r, s in zip(a.calls[path], b.calls[path], strict=True))
    return any(not torch.equal(r.index, s.index) for r, s in pairs)


def test_a_perturbed_model_takes_the_recorded_experts_and_learns(tmp_path):
    model, x = Stack(), torch.randn(300, HIDDEN)
    with torch.no_grad(), record_routing(model) as rollout:
        model(x)
    rollout.save(tmp_path / "rollout")
    rollout = RoutingTrace.load(tmp_path / "rollout")
    trained = perturbed(model)
    with record_routing(trained) as free:
        trained(x)
    assert differ(free, rollout), "the perturbation must matter for this test to say anything"

    with record_routing(trained, logits=True) as replayed, replay_routing(trained, rollout):
        out = trained(x)
    assert not differ(replayed, rollout)
    assert not has_hooks(trained)
    first = replayed.calls[PATHS[0]][0]
    scores = (x.double() @ trained.layers[0].router.weight.double().t()).softmax(1).gather(1, first.index)
    torch.testing.assert_close(first.weights, (scores / scores.sum(1, keepdim=True)).float())
    assert not torch.equal(first.weights, rollout.calls[PATHS[0]][0].weights)
    out.square().sum().backward()
    for layer in trained.layers:
        assert layer.router.weight.grad.abs().sum() > 0


def test_replays_prefill_and_decoding_call_by_call():
    model = Stack()
    prompts = [torch.randn(n, HIDDEN) for n in (6, 1, 1, 1, 1)]
    with record_routing(model) as trace:
        want = [model(x) for x in prompts]
    other = perturbed(model)
    with record_routing(other) as replayed, replay_routing(other, trace):
        have = [other(x) for x in prompts]
    assert [r.index.shape[0] for r in replayed.calls[PATHS[0]]] == [6, 1, 1, 1, 1]
    assert not differ(replayed, trace)
    for a, b in zip(have, want, strict=True):
        assert torch.isfinite(a).all()
        assert not torch.equal(a, b)


def test_expert_choices_are_replayed_by_token():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=1)
    x, token = torch.randn(4, HIDDEN), torch.tensor([0, 3, 3])
    recorded = Routing(torch.tensor([[1], [0], [5]]), torch.ones(3, 1), torch.zeros(4, EXPERTS), None, token)
    with replay_routing(router, RoutingTrace({"": [recorded]})):
        routing = router(x)
    assert torch.equal(routing.token, token)
    with (
        pytest.raises(InputError, match="recorded with 4 tokens and 6 experts, and has 2 and"),
        replay_routing(router, RoutingTrace({"": [recorded]})),
    ):
        router(x[:2])


def recorded_trace(model: nn.Module, *sizes: int) -> RoutingTrace:
    with record_routing(model) as trace:
        for n in sizes:
            model(torch.randn(n, HIDDEN))
    return trace


def test_one_call_more_than_recorded_is_an_error():
    model = Stack()
    trace = recorded_trace(model, 5)
    with replay_routing(model, trace):
        model(torch.randn(5, HIDDEN))
        with pytest.raises(InputError, match=r"'layers\.0\.router', call 2: only 1 calls were recorded"):
            model(torch.randn(5, HIDDEN))


def test_calls_left_over_are_an_error_but_not_on_top_of_another():
    model = Stack()
    trace = recorded_trace(model, 5, 5)
    with (
        pytest.raises(InputError, match=r"'layers\.0\.router' was called 1 times, and 2 calls were recorded"),
        replay_routing(model, trace),
    ):
        model(torch.randn(5, HIDDEN))
    assert not has_hooks(model)
    with pytest.raises(KeyError, match="mine"), replay_routing(model, trace):
        raise KeyError("mine")
    assert not has_hooks(model)


def test_other_tokens_experts_or_paths_are_errors():
    model = Stack()
    trace = recorded_trace(model, 5)
    with replay_routing(model, RoutingTrace({})), pytest.raises(InputError, match="call 1: only 0 calls"):
        model(torch.randn(5, HIDDEN))
    with (
        pytest.raises(InputError, match=r"call 1: was recorded with 5 tokens and \d+ experts, and has 4 and"),
        replay_routing(model, trace),
    ):
        model(torch.randn(4, HIDDEN))
    larger = TopKRouter(HIDDEN, num_experts=EXPERTS + 1, top_k=TOP_K)
    with (
        pytest.raises(InputError, match=f"and {EXPERTS} experts, and has 5 and {EXPERTS + 1} now"),
        replay_routing(larger, RoutingTrace({"": trace.calls[PATHS[0]]})),
    ):
        larger(torch.randn(5, HIDDEN))
    with (
        pytest.raises(InputError, match=r"calls of 'layers\.0\.router'.*its routers are 'router'"),
        replay_routing(model.layers[0], trace),
    ):
        pass
    for context in (record_routing(nn.Linear(2, 2)), replay_routing(nn.Linear(2, 2), trace)):
        with pytest.raises(InputError, match=r"Linear has neither a kpt_moe\.routers\.Router"), context:
            pass


def test_nested_recordings_both_see_every_call():
    model = Stack()
    with record_routing(model) as outer:
        model(torch.randn(2, HIDDEN))
        with record_routing(model) as inner:
            model(torch.randn(3, HIDDEN))
        model(torch.randn(4, HIDDEN))
    assert [r.index.shape[0] for r in outer.calls[PATHS[0]]] == [2, 3, 4]
    assert [r.index.shape[0] for r in inner.calls[PATHS[0]]] == [3]


def test_what_is_compiled_records_and_replays_too():
    model, x = Stack(capacity_factor=None), torch.randn(9, HIDDEN)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    with record_routing(compiled) as trace:
        compiled(x)
    assert [len(trace.calls[path]) for path in PATHS] == [1, 1]
    flipped = RoutingTrace(
        {
            path: [Routing(r.index.flip(0), r.weights, r.logits, r.mask, r.token) for r in calls]
            for path, calls in trace.calls.items()
        }
    )
    with replay_routing(model, flipped), record_routing(model) as replayed:
        compiled(x)
    # The recorder's hooks see what routers return, so what they were made to choose.
    assert not differ(replayed, flipped)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_records_once_and_replays_twice(reentrant):
    model = Stack().double()
    xs = [torch.randn(20, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with torch.no_grad(), record_routing(model) as trace:
        for x in xs:
            model(x.flip(0))
    gradients = []
    for checkpointing in (None, reentrant):
        model.checkpointing = checkpointing
        model.zero_grad()
        with replay_routing(model, trace), record_routing(model) as replayed:
            for x in xs:
                model(x).square().sum().backward()
        assert not differ(replayed, trace)
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_repeated_forward_that_could_be_of_two_calls_is_refused():
    model = Stack()
    trace = recorded_trace(model, 4, 4)
    model.checkpointing = False
    x = torch.randn(4, HIDDEN, requires_grad=True)
    with pytest.raises(InputError, match="4 tokens, which may be any of 2"), replay_routing(model, trace):
        (model(x) + model(x)).sum().backward()


def test_backward_may_come_twice_under_checkpointing():
    model = Stack()
    trace = recorded_trace(model, 4)
    model.checkpointing = False
    with replay_routing(model, trace):
        out = model(torch.randn(4, HIDDEN, requires_grad=True)).sum()
        out.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        out.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], first)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_of_transformers_take_the_recorded_experts_and_weights(family):
    model = FAMILIES[family].build()
    ids = torch.randint(3, VOCABULARY, (2, 40))
    with torch.no_grad(), record_routing(model) as rollout:
        model(ids)
    assert all(path.endswith("experts") for path in rollout.calls)
    assert len(rollout.calls) == 2
    other = perturbed(model)
    with record_routing(other) as free:
        other(ids)
    assert differ(free, rollout)
    with replay_routing(other, rollout), record_routing(other) as replayed:
        other(ids).logits.square().sum().backward()
    assert not differ(replayed, rollout)
    for path, calls in rollout.calls.items():
        experts = other.get_submodule(path)
        assert calls[0].num_experts == experts.num_experts
        assert torch.equal(replayed.calls[path][0].weights, calls[0].weights)
        assert all(p.grad is not None for p in experts.parameters())


@pytest.mark.usefixtures("quiet")
def test_generation_with_a_cache_is_replayed():
    model = FAMILIES["mixtral"].build()
    ids = torch.randint(3, VOCABULARY, (1, 5))
    with record_routing(model) as trace:
        want = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert [r.index.shape[0] for r in next(iter(trace.calls.values()))] == [5, 1, 1, 1]
    with replay_routing(model, trace), record_routing(model) as replayed:
        have = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(have, want)
    assert not differ(replayed, trace)
