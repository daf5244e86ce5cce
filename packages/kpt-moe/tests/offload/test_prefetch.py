"""Loads begin ahead of need, predictions are counted, and neither ever changes a result."""

import threading

import pytest
import torch
from torch import nn

from kpt_core import KptError
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.offload import offload_experts
from kpt_moe.offload.cache import find_gate, predict
from kpt_moe.offload.store import HostStore
from kpt_moe.routers import TopKRouter

HIDDEN = 16


class Residual(nn.Module):
    def __init__(self, num_experts: int = 8, scale: float = 0.1, **router) -> None:
        super().__init__()
        self.moe = MoELayer(
            MoEConfig(hidden_size=HIDDEN, num_experts=num_experts, intermediate_size=12),
            router=TopKRouter(HIDDEN, num_experts=num_experts, top_k=2, **router),
        )
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.moe(x)


class Loads:
    """Watches the store: which expert was read, by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before=lambda name, expert: None) -> None:
        self.seen: list[tuple[str, int, bool]] = []
        read = HostStore.read

        def expert(store, name, number=None):
            if number is not None and name.endswith("gate_up_proj"):
                before(name, number)
                self.seen.append((name, number, threading.current_thread() is not threading.main_thread()))
            return read(store, name, number)

        monkeypatch.setattr(HostStore, "read", expert)


def chosen(router: TopKRouter, x: torch.Tensor) -> set[int]:
    return set(router(x).index.flatten().tolist())


@pytest.mark.parametrize("scale", [0.0, 0.1, 10.0])
def test_predictions_are_those_of_the_next_router_and_are_counted(scale):
    model = nn.Sequential(*(Residual(scale=scale) for _ in range(3)))
    x = torch.randn(2, HIDDEN)
    inputs = [x]
    with torch.no_grad():
        for block in model:
            inputs.append(block(inputs[-1]))
        predicted = [chosen(model[i].moe.router, inputs[i - 1]) for i in (1, 2)]
        right = [chosen(model[i].moe.router, inputs[i]) & guess for i, guess in zip((1, 2), predicted, strict=True)]
        with offload_experts(model, "100%") as handle:
            model(x)
            first, *others = handle.statistics().values()
    assert (first.predicted, first.prefetch) == (0, "no prefetch: no module of experts comes before")
    assert [layer.predicted for layer in others] == [len(guess) for guess in predicted]
    assert [layer.predicted_right for layer in others] == [len(both) for both in right]
    assert {layer.prefetch for layer in others} == {"router lookahead"}
    assert scale > 0 or right == predicted
    assert scale < 10 or right != predicted


def test_the_next_layers_experts_are_loaded_while_this_layer_computes(monkeypatch):
    model = nn.Sequential(Residual(scale=0.0), Residual(scale=0.0))
    x = torch.randn(1, HIDDEN)
    arrived = threading.Event()
    loads = Loads(monkeypatch, lambda name, expert: arrived.set() if name.startswith("1.") else None)
    with torch.no_grad(), offload_experts(model, "100%") as handle:
        waited = []
        # Layer 0 ends no sooner than a load for layer 1 has begun: without overlap it would wait in vain.
        model[0].moe.experts.register_forward_hook(lambda *_: waited.append(arrived.wait(60)))
        model(x)
        needed = chosen(model[1].moe.router, x)
        count = handle.statistics()["1.moe.experts"]
    assert waited == [True]
    ahead = {expert for name, expert, behind in loads.seen if name.startswith("1.") and behind}
    assert ahead
    assert ahead <= needed
    assert count.hits + count.misses == len(needed)
    assert count.hits >= len(ahead)


def test_without_prefetch_every_load_is_the_callers(monkeypatch):
    model = nn.Sequential(Residual(), Residual())
    loads = Loads(monkeypatch)
    with torch.no_grad(), offload_experts(model, "50%", prefetch=False) as handle:
        model(torch.randn(5, HIDDEN))
        total = handle.total()
        reasons = {layer.prefetch for layer in handle.statistics().values()}
    assert not any(behind for _, _, behind in loads.seen)
    assert total.predicted == 0
    assert total.misses == len(loads.seen) > 0
    assert reasons == {"no prefetch: switched off"}


def test_wrong_predictions_change_nothing(monkeypatch):
    model = nn.Sequential(*(Residual() for _ in range(3)))
    x = torch.randn(4, HIDDEN)
    with torch.no_grad():
        with offload_experts(model, "100%", prefetch=False):
            want = model(x)
        asked = predict_the_least_likely(monkeypatch)
        for budget in ("10%", "40%", "100%"):
            with offload_experts(model, budget) as handle:
                assert torch.equal(model(x), want)
                assert torch.equal(model(x), want)
                total = handle.total()
            assert total.predicted_right < total.predicted
    assert asked


def predict_the_least_likely(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Predict the least likely experts."""
    asked: list[int] = []

    def wrong(gate, x, top_k):
        asked.append(top_k)
        return predict(lambda x: -gate(x), x, top_k)

    monkeypatch.setattr("kpt_moe.offload.offloaded_experts.predict", wrong)
    return asked


def test_random_numbers_are_left_alone():
    model = nn.Sequential(*(Residual(jitter=0.5) for _ in range(3))).train()
    x = torch.randn(4, HIDDEN)
    states = []
    with torch.no_grad():
        for prefetch in (False, True):
            with offload_experts(model, "50%", prefetch=prefetch):
                torch.manual_seed(7)
                model(x)
                states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("second", ["experts", "size", "router"])
def test_a_router_for_other_tokens_or_experts_predicts_nothing(second):
    block = Residual()
    if second == "router":
        block.moe.router = nn.Identity()
    assert find_gate(block.moe, 8 + (second == "experts"), HIDDEN + (second == "size")) is None
    assert callable(find_gate(Residual().moe, 8, HIDDEN))


def test_a_block_without_a_known_router_runs_unpredicted():
    model = nn.Sequential(Residual(), Residual())
    router = model[1].moe.router
    model[1].moe.router = nn.Module()
    model[1].moe.router.forward = lambda x, **kwargs: router(x)
    x = torch.randn(4, HIDDEN)
    with torch.no_grad():
        want = model(x)
        with offload_experts(model, "50%") as handle:
            torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)
            count = handle.statistics()["1.moe.experts"]
    assert count.prefetch == (
        f"no prefetch: MoELayer has neither a router of KPT's nor a gate with a weight [8, {HIDDEN}], for tokens of "
        "the block before"
    )
    assert count.predicted == 0


def test_most_wanted_experts_come_first():
    x = torch.eye(4)[[0, 0, 0, 1, 1, 3]]
    assert predict(lambda x: x, x, 1) == [0, 1, 3]
    assert predict(lambda x: x.new_zeros(0, 4), x[:0], 2) == []


def test_an_error_in_the_background_reaches_the_caller(monkeypatch):
    model = nn.Sequential(Residual(scale=0.0), Residual(scale=0.0))
    x = torch.randn(1, HIDDEN)
    broken = [True]

    def fail(name, expert):
        if broken and name.startswith("1."):
            if threading.current_thread() is not threading.main_thread():
                arrived.set()
            raise OSError("no such sector")

    arrived = threading.Event()
    Loads(monkeypatch, fail)
    with torch.no_grad():
        want = model(x)
        with offload_experts(model, "100%"):
            model[0].moe.experts.register_forward_hook(lambda *_: arrived.wait(60) and None)
            with pytest.raises(KptError, match=r"expert \d of '1.moe.experts' could not be loaded: no such sector"):
                model(x)
            broken.clear()
            torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)


def test_the_thread_ends_with_the_offloading():
    model = nn.Sequential(Residual(), Residual())

    def background() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("kpt-moe-offload")]

    with torch.no_grad(), offload_experts(model, "50%"):
        model(torch.randn(4, HIDDEN))
        assert len(background()) == 1
    assert background() == []
