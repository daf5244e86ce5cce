import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError, KptWarning, UnknownNameError
from kpt_moe import MoEConfig, MoELayer, TopKRouter
from kpt_moe._counting import in_recomputation
from kpt_moe.losses import entropy_loss, gshard_loss, sequence_loss, switch_loss, z_loss
from kpt_moe.router_losses import RouterLosses, outer_routers

HIDDEN, EXPERTS = 8, 4


class Model(nn.Module):
    """Residual MoE layers, checkpointed or not, that note what their routers decided."""

    def __init__(self, layers: int = 2, scores: tuple[str, ...] = (), recompute: bool | None = None) -> None:
        super().__init__()
        scores = scores or ("softmax",) * layers
        self.layers = nn.ModuleList(
            MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=4, score=score))
            for score in scores
        )
        self.recompute = recompute
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute is None:
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.recompute)
        return x

    def block(self, layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + layer(x)

    def routings(self, x: torch.Tensor) -> list:
        found = []
        for layer in self.layers:
            found.append(layer.route(x))
            x = x + layer(x, found[-1])
        return found


def gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def test_total_is_the_weighted_mean_of_each_routers_losses():
    model, x = Model(scores=("softmax", "sigmoid")), torch.randn(6, HIDDEN)
    weights = {"switch": 0.1, "gshard": 0.2, "entropy": 0.3, "token_entropy": -0.4, "z": 0.5, "sequence": 0.6}
    parts: dict[str, torch.Tensor] = dict.fromkeys(weights, 0.0)
    for routing, score in zip(model.routings(x), ("softmax", "sigmoid"), strict=True):
        parts["switch"] += switch_loss(routing, score=score) / 2
        parts["gshard"] += gshard_loss(routing, score=score) / 2
        parts["entropy"] += entropy_loss(routing, score=score) / 2
        parts["token_entropy"] += entropy_loss(routing, score=score, per_token=True) / 2
        parts["z"] += z_loss(routing) / 2
        parts["sequence"] += sequence_loss(routing, score=score, batch_size=3) / 2
    losses = RouterLosses(model, **weights)
    model(x)
    total = losses.total(batch_size=3)
    torch.testing.assert_close(total, sum(weights[name] * part for name, part in parts.items()))
    assert set(losses.values()) == set(weights)
    for name, value in losses.values().items():
        torch.testing.assert_close(value, parts[name].detach())
        assert not value.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "pooled"])
def test_routers_are_reduced_as_said(reduction):
    model, x = Model(), torch.randn(6, HIDDEN)
    routings = model.routings(x)
    each = torch.stack([switch_loss(routing) for routing in routings])
    want = {"mean": each.mean(), "sum": each.sum(), "pooled": switch_loss(routings)}[reduction]
    losses = RouterLosses(model, switch=0.5, reduction=reduction)
    model(x)
    torch.testing.assert_close(losses.total(), 0.5 * want)


@pytest.mark.parametrize("reduction", ["mean", "pooled"])
def test_a_loss_of_a_routing_is_that_of_its_router(reduction):
    """Neither is told that the gate has sigmoids."""
    model, x = Model(scores=("sigmoid", "softmax")), torch.randn(50, HIDDEN)
    routings = model.routings(x)
    assert [routing.score for routing in routings] == ["sigmoid", "softmax"]
    losses = RouterLosses(model, switch=1, reduction=reduction)
    model(x)
    each = torch.stack([switch_loss(routing) for routing in routings]).mean()
    torch.testing.assert_close(losses.total(), switch_loss(routings) if reduction == "pooled" else each)
    assert not torch.isclose(switch_loss(routings[0]), switch_loss(routings[0], score="softmax"))


def test_score_of_the_caller_replaces_the_routers():
    model, x = Model(1), torch.randn(6, HIDDEN)
    losses = RouterLosses(model, switch=1, score="sigmoid")
    model(x)
    torch.testing.assert_close(losses.total(), switch_loss(model.layers[0].route(x), score="sigmoid"))


@pytest.mark.parametrize("pooled", [False, True])
def test_global_batch_counts_until_step(pooled):
    model, first, second = Model(), torch.randn(6, HIDDEN), torch.randn(4, HIDDEN)
    a, b = model.routings(first), model.routings(second)

    def formula(before, now):
        asked = sum(r.asked_per_expert() for r in [*before, *now])
        return EXPERTS * (asked / asked.sum() * torch.cat([r.logits for r in now]).softmax(-1).mean(0)).sum()

    losses = RouterLosses(model, global_batch=1, reduction="pooled" if pooled else "mean")
    for x, before, now in ((first, [], a), (second, a, b)):
        model(x)
        if pooled:
            want = formula(before, now)
        else:
            want = sum(formula(before[i : i + 1], now[i : i + 1]) for i in range(2)) / 2
        torch.testing.assert_close(losses.total(), want)
    losses.step()
    model(first)
    torch.testing.assert_close(losses.total(), formula([], a) if pooled else sum(formula([], [r]) for r in a) / 2)


@pytest.mark.parametrize("recompute", [None, False])
def test_recomputation_adds_nothing(recompute):
    x = torch.randn(6, HIDDEN, requires_grad=True)
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    model = Model(recompute=recompute)
    results = []
    for one in (plain, model):
        losses = RouterLosses(one, switch=0.3, z=0.1)
        for _ in range(2):
            total = (one(x).square().sum() + losses.total()) / 2
            total.backward()
        with pytest.raises(InputError, match="no router ran"):
            losses.total()
        results.append((total.detach(), gradients(one)))
    assert model.runs == (4 if recompute is None else 8)
    torch.testing.assert_close(*results)
    assert not in_recomputation()


def test_what_compiled_code_repeats_in_backward_adds_nothing():
    model, x = Model(1), torch.randn(6, HIDDEN, requires_grad=True)
    want = switch_loss(model.routings(x)[0])
    losses = RouterLosses(model, switch=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out = checkpoint(lambda x: compiled(x).sin().exp(), x, use_reentrant=False)
        total = losses.total()
        torch.testing.assert_close(total, want)
        (out.sum() + total).backward()
    assert not losses._calls


def test_what_was_decided_before_a_backward_is_kept():
    model, x = Model(1), torch.randn(6, HIDDEN)
    losses = RouterLosses(model, switch=1)
    model(x)
    first = losses.total()
    model(x)
    first.backward()
    torch.testing.assert_close(losses.total(), first)


def test_lost_gradients_of_reentrant_checkpoints_are_named():
    model = Model(recompute=True)
    losses = RouterLosses(model, z=1)
    model(torch.randn(6, HIDDEN, requires_grad=True))
    with pytest.raises(InputError, match=r"router 'layers.0.router' is training, .* use_reentrant=False"):
        losses.total()


def test_accumulated_gradients_are_those_of_the_mean():
    model, parts = Model(), torch.randn(3, 6, HIDDEN)
    losses = RouterLosses(model, switch=0.3)
    for part in parts:
        ((model(part).square().sum() + losses.total()) / 3).backward()
    have = gradients(model)
    losses.close()
    aux = torch.stack([switch_loss(routing) for part in parts for routing in model.routings(part)]).mean()
    (sum(model(part).square().sum() for part in parts) / 3 + 0.3 * aux).backward()
    torch.testing.assert_close(have, gradients(model))


@pytest.mark.parametrize("reduction", ["mean", "sum", "pooled"])
def test_of_several_forwards_before_one_total_the_newest_counts(reduction):
    model, parts = Model(1), torch.randn(3, 6, HIDDEN)
    losses = RouterLosses(model, switch=1, reduction=reduction)
    model(parts[0])
    old = weakref.ref(losses._calls[1][1].logits)
    for part in parts[1:]:
        with pytest.warns(KptWarning, match=r"ran again before total\(\)"):
            model(part)
    assert len(losses._calls) == 2  # that it began, and what was decided
    gc.collect()
    assert old() is None
    torch.testing.assert_close(losses.total(), switch_loss(model.layers[0].route(parts[-1])))


@pytest.mark.parametrize("looks", ["before", "after"])
def test_a_forward_without_gradients_is_no_part_of_the_loss(looks):
    model, x, other = Model(1), torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
    losses = RouterLosses(model, switch=1)
    for batch in (other, other, x) if looks == "before" else (x, other, other):
        with torch.set_grad_enabled(batch is x):
            model(batch)
    total = losses.total()
    torch.testing.assert_close(total, switch_loss(model.layers[0].route(x)))
    assert total.requires_grad


def test_a_look_without_gradients_has_a_total_of_its_own():
    model, x = Model(1), torch.randn(6, HIDDEN)
    losses = RouterLosses(model, switch=1)
    with torch.no_grad():
        model(x)
        torch.testing.assert_close(losses.total(), switch_loss(model.layers[0].route(x)))


def test_keeps_no_graph():
    model = Model()
    losses = RouterLosses(model, switch=1, z=1)
    model(torch.randn(6, HIDDEN))
    logits = weakref.ref(losses._calls[1][1].logits)
    total = losses.total()
    total.backward()
    del total
    gc.collect()
    assert logits() is None


def test_trains_routers_towards_balance():
    torch.manual_seed(0)
    model = Model(1)
    with torch.no_grad():
        model.layers[0].router.weight[0] += 1.0
    x = torch.randn(64, HIDDEN) + 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, seen = RouterLosses(model, switch=1.0), []
    for _ in range(30):
        model(x)
        losses.total().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(losses.values()["switch"].item())
    assert seen[0] > 1.2
    assert seen[-1] < 1.05


def test_evaluation_is_left_alone_unless_asked_for():
    model, x = Model().eval(), torch.randn(6, HIDDEN)
    trained, always = RouterLosses(model, z=1), RouterLosses(model, z=1, training_only=False)
    with torch.no_grad():
        model(x)
    with pytest.raises(InputError, match="no router ran in training mode"):
        trained.total()
    torch.testing.assert_close(always.total(), torch.stack([z_loss(r) for r in model.routings(x)]).mean())


def test_a_context_ends_collecting():
    model, x = Model(), torch.randn(6, HIDDEN)
    with RouterLosses(model, z=1) as losses:
        model(x)
        assert losses.total() > 0
        model(x)
    model(x)
    losses.close()
    with pytest.raises(InputError, match=r"no router ran .* since the last total\(\)"):
        losses.total()
    assert not any(router._forward_hooks for router in outer_routers(model).values())


def test_a_compiled_model_is_collected_too():
    model, x = Model(), torch.randn(6, HIDDEN)
    losses = RouterLosses(model, switch=0.3, z=0.1)
    results = []
    for run in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        out = run(x)
        total = losses.total()
        (out.square().sum() + total).backward()
        results.append((total.detach(), gradients(model)))
    torch.testing.assert_close(*results)


def test_routers_within_routers_are_not_collected_twice():
    class Outer(TopKRouter):
        def __init__(self) -> None:
            super().__init__(HIDDEN, num_experts=EXPERTS, top_k=2)
            self.inner = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=2)

    assert list(outer_routers(nn.Sequential(Outer(), TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=1)))) == ["0", "1"]
    assert list(outer_routers(Outer())) == [""]


def test_wrong_arguments_are_named():
    model = Model(scores=("softmax", "sigmoid"))
    with pytest.raises(InputError, match=r"Linear has no module that is a kpt_moe.routers.Router"):
        RouterLosses(nn.Linear(2, 2), z=1)
    for weights in ({}, {"z": 0.0}):
        with pytest.raises(InputError, match="one of the weights must be other than zero"):
            RouterLosses(model, **weights)
    with pytest.raises(UnknownNameError, match="unknown reduction 'means': did you mean 'mean'"):
        RouterLosses(model, z=1, reduction="means")
    losses = RouterLosses(model, sequence=1)
    model(torch.randn(6, HIDDEN))
    with pytest.raises(InputError, match="give either cu_seqlens or batch_size"):
        losses.total()
