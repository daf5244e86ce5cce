import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer, Router, TopKRouter
from kpt_moe.losses import entropy_loss, switch_loss, z_loss
from kpt_moe.routers import GShardRouter, HashRouter
from kpt_moe.scheduling import (
    CapacitySchedule,
    ExpertDropout,
    ExpertWarmup,
    RouterUtilisation,
    UtilisationMonitor,
    UtilisationReport,
    revive_dead_experts,
)

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


def make(router: Router | None = None, bias: bool = False, **options) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, intermediate_size=4, bias=bias)
    return MoELayer(config, router=router or TopKRouter(HIDDEN, EXPERTS, TOP_K, bias=bias, **options))


def used(layer: MoELayer, tokens: int = 200) -> set[int]:
    """Experts that serve some token."""
    return set(layer.route(torch.randn(tokens, HIDDEN)).tokens_per_expert().nonzero().flatten().tolist())


def restricted(layer: MoELayer, x: torch.Tensor, open_experts: list[int]) -> torch.Tensor:
    """The layer as if it only had some experts, token by token in float64."""
    rows = []
    for token in x.double():
        probability = (layer.router.weight.double()[open_experts] @ token).softmax(0)
        best = probability.topk(TOP_K)
        out = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, place in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            expert = open_experts[place]
            gate, up = (layer.experts.gate_up_proj[expert].double() @ token).chunk(2)
            out = out + weight * (layer.experts.down_proj[expert].double() @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


class RefusesNothing(TopKRouter):
    """Chooses the first experts whatever the logits are, as a hash router would."""

    def choose(self, logits, scores, mask, token_ids):
        return torch.arange(self.top_k).repeat(logits.shape[0], 1), None


# What a router does with experts that can't be chosen.


@pytest.mark.parametrize("attribute", ["unavailable", "dropped"])
def test_the_layer_acts_as_if_closed_experts_did_not_exist(attribute):
    layer, x = make(), torch.randn(20, HIDDEN)
    setattr(layer.router, attribute, torch.tensor([True, False, False, True, False, False]))
    want = restricted(layer, x, [1, 2, 4, 5])
    out = layer(x)
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    wanted = list(layer.parameters())
    have = torch.autograd.grad(out.square().sum(), wanted)
    torch.testing.assert_close(have, torch.autograd.grad(want.square().sum(), wanted), rtol=1e-3, atol=1e-4)
    assert have[0][0].abs().sum() == 0
    layer.eval()
    closed = [1, 2, 4, 5] if attribute == "unavailable" else list(range(EXPERTS))
    torch.testing.assert_close(layer(x), restricted(layer, x, closed).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "softmax_after", "sigmoid"])
def test_no_bias_or_score_makes_a_closed_expert_chosen(score):
    layer = make(score=score, correction_bias=True)
    layer.router.correction_bias[0] = 100.0
    assert 0 in used(layer)
    layer.router.unavailable = torch.arange(EXPERTS) == 0
    assert used(layer) == {1, 2, 3, 4, 5}
    assert (layer.route(torch.randn(50, HIDDEN)).index > 0).all(), "refused where another was to be chosen"


def test_choices_of_closed_experts_made_all_the_same_are_refused():
    layer = make(RefusesNothing(HIDDEN, EXPERTS, TOP_K))
    layer.router.unavailable = torch.arange(EXPERTS) == 1
    routing = layer.route(torch.randn(5, HIDDEN))
    assert routing.index.tolist() == [[0, ~1]] * 5
    assert routing.weights[:, 1].abs().sum() == 0
    assert routing.weights.isfinite().all()


def test_losses_see_the_open_experts_alone():
    layer, x = make(), torch.randn(20, HIDDEN)
    layer.router.unavailable = torch.tensor([True, False, False, True, False, False])
    routing = layer.route(x)
    logits = layer.router.gate(x)[:, [1, 2, 4, 5]]
    p = logits.softmax(-1).mean(0)
    asked = routing.asked_per_expert()[[1, 2, 4, 5]] / 20
    torch.testing.assert_close(switch_loss(routing), EXPERTS * (p * asked).sum())
    torch.testing.assert_close(z_loss(routing), logits.logsumexp(-1).square().mean())
    torch.testing.assert_close(entropy_loss(routing), math.log(EXPERTS) + (p * p.log()).sum())


def test_replay_takes_choices_as_they_are():
    layer, x = make(), torch.randn(9, HIDDEN)
    routing = layer.route(x)
    layer.router.unavailable = torch.arange(EXPERTS) < 3
    again = layer.router(x, replay=routing)
    assert torch.equal(again.index, routing.index)
    torch.testing.assert_close(again.weights, routing.weights)


def test_closed_experts_are_no_state_and_move_with_the_module():
    layer = make()
    names = set(layer.state_dict())
    layer.router.unavailable = torch.zeros(EXPERTS, dtype=torch.bool)
    assert set(layer.state_dict()) == names
    assert layer.to("meta").router.unavailable.device.type == "meta"


# Schedules.


@pytest.mark.parametrize(
    ("curve", "want"),
    [
        ("linear", [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        ("cosine", [1.5 + 0.5 * math.cos(math.pi * min(t, 4) / 4) for t in range(6)]),
        ("step", [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]),
    ],
)
def test_capacity_follows_its_curve(curve, want):
    layer = make(capacity_factor=5.0)
    schedule = CapacitySchedule(layer, 2.0, 1.0, 4, curve=curve)
    have = [layer.router.capacity_factor]
    for _ in range(5):
        schedule.step()
        have.append(layer.router.capacity_factor)
    assert have == pytest.approx(want)


def test_less_capacity_drops_more_tokens():
    layer, x = make(capacity_factor=1.0), torch.randn(60, HIDDEN)
    schedule, loads = CapacitySchedule(layer, 1.0, 0.1, 1), []
    for _ in range(2):
        routing = layer.route(x)
        loads.append((int(routing.tokens_per_expert().max()), int(routing.dropped())))
        schedule.step()
    assert loads[0][0] == 20
    assert loads[1] == (2, 120 - 2 * EXPERTS)


def test_routers_without_capacity_stay_without():
    model = nn.Sequential(make(), make(capacity_factor=1.0))
    CapacitySchedule(model, 2.0, 1.0, 4)
    assert [layer.router.capacity_factor for layer in model] == [None, 2.0]


def test_dropout_hides_experts_in_training_alone():
    layer = make()
    dropout, absent = ExpertDropout(layer, 0.3), []
    for _ in range(200):
        hidden = set(layer.router.dropped.nonzero().flatten().tolist())
        absent.append(len(hidden))
        assert len(hidden) <= EXPERTS - TOP_K
        assert not used(layer.train(), 20) & hidden
        dropout.step()
    # The mean of a binomial distribution, of which more than four do not occur.
    chances = [math.comb(6, n) * 0.3**n * 0.7 ** (6 - n) for n in range(7)]
    want = sum(min(n, 4) * chance for n, chance in enumerate(chances))
    assert sum(absent) / len(absent) == pytest.approx(want, abs=0.25)
    assert used(layer.eval()) == set(range(EXPERTS))
    dropout.remove()
    assert used(layer.train()) == set(range(EXPERTS))


def test_dropout_of_nearly_all_leaves_as_many_as_a_token_needs():
    layer = make()
    ExpertDropout(layer, 0.999)
    assert len(used(layer)) == TOP_K


def test_dropout_leaves_enough_in_each_group_and_of_those_that_warm_up():
    layer = make(num_groups=3, top_groups=2)
    warmup = ExpertWarmup(layer, 3, 10)
    dropout = ExpertDropout(layer, 0.9)
    for _ in range(30):
        warming = (
            torch.zeros(EXPERTS, dtype=torch.bool) if layer.router.unavailable is None else layer.router.unavailable
        )
        routing = layer.route(torch.randn(20, HIDDEN))
        assert (routing.index >= 0).all(), "a token found too few experts"
        assert not (warming | layer.router.dropped)[routing.index].any()
        warmup.step()
        dropout.step()
    assert layer.router.unavailable is None


def test_dropout_goes_by_seed_and_step_alone():
    def masks(dropout, steps):
        found = []
        for _ in range(steps):
            found.append([layer.router.dropped.tolist() for layer in layers])
            dropout.step()
        return found

    layers = nn.ModuleList([make(), make()])
    first = masks(ExpertDropout(layers, 0.4), 8)
    assert any(a != b for a, b in first), "routers of a model must not drop alike"
    assert first != masks(ExpertDropout(layers, 0.4, seed=1), 8)
    half = ExpertDropout(layers, 0.4)
    for _ in range(4):
        half.step()
    layers = nn.ModuleList([make(), make()])
    resumed = ExpertDropout(layers, 0.4)
    resumed.load_state_dict(half.state_dict())
    assert masks(resumed, 4) == first[4:]


@pytest.mark.parametrize("training", [True, False])
def test_warmup_opens_experts(training):
    layer = make().train(training)
    warmup = ExpertWarmup(layer, 2, 8)
    for count in (2, 2, 3, 3, 4, 4, 5, 5, 6, 6):
        assert used(layer) == set(range(count))
        warmup.step()
    assert layer.router.unavailable is None


def test_warmup_opens_experts_evenly_over_groups():
    layer = make(num_groups=3, top_groups=2)
    ExpertWarmup(layer, 3, 8)
    assert used(layer) == {0, 2, 4}


def test_warmup_raises_the_experts_per_token():
    layer, x = make(), torch.randn(5, HIDDEN)
    warmup = ExpertWarmup(layer, 1, 2, what="top_k")
    for top_k in (1, 1, 2, 2):
        assert layer.route(x).top_k == top_k
        assert layer(x).shape == x.shape
        warmup.step()


@pytest.mark.parametrize("what", ["capacity", "experts", "top_k"])
def test_schedules_resume(what):
    def schedule(layer):
        if what == "capacity":
            return CapacitySchedule(layer, 3.0, 1.0, 5)
        return ExpertWarmup(layer, 2 if what == "experts" else 1, 5, what=what)

    layers = make(capacity_factor=1.0), make(capacity_factor=1.0)
    first, second = map(schedule, layers)
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    x = torch.randn(30, HIDDEN)
    assert torch.equal(layers[0].route(x).index, layers[1].route(x).index)
    for wrong in ({}, {"steps_done": -1}, {"steps_done": "3"}):
        with pytest.raises(InputError, match="steps_done must be an integer of at least 0"):
            second.load_state_dict(wrong)


def test_another_set_of_closed_experts_compiles_nothing_again():
    layer, x = make(), torch.randn(20, HIDDEN)
    dropout, present = ExpertDropout(layer, 0.5), layer.router.dropped
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), layer(x))
        dropout.step()
    assert counter.frame_count == 1
    assert layer.router.dropped is present, "a CUDA graph goes by the address"


# Watching and reviving.


def skewed(seldom: int = 2) -> MoELayer:
    """A layer one of whose experts no token of `tokens()` asks for."""
    layer = make(bias=True, correction_bias=True)
    with torch.no_grad():
        layer.router.bias[seldom] = -100.0
        layer.router.correction_bias.uniform_(0, 0.01)
    return layer


def test_monitor_reports_what_was_asked_for():
    model, reports = nn.Sequential(make(), skewed()), []
    monitor = UtilisationMonitor(model, reports.append, every=3, max_imbalance=1.01)
    x, want = torch.randn(3, 40, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int64)
    for t, part in enumerate(x):
        want += model[0].route(part).asked_per_expert()
        model[1](part)
        model.eval()
        model(part)
        model.train()
        assert (monitor.step() is None) == (t < 2)
    (report,) = reports
    assert report.step == 3
    assert report.routers["0.router"].asked == tuple(want.tolist())
    assert report.routers["0.router"].imbalance == pytest.approx(want.max().item() / want.float().mean().item())
    assert report.dead == {"1.router": (2,)}
    assert report.unbalanced == ("0.router", "1.router")
    model(x[0])
    for _ in range(3):
        again = monitor.step()
    assert sum(again.routers["0.router"].asked) == 40 * TOP_K, "a report begins anew"


def test_monitor_calls_back_only_where_something_is_wrong():
    layer, calls = make(), []
    with UtilisationMonitor(layer, calls.append, every=1, max_imbalance=5) as monitor:
        layer(torch.randn(200, HIDDEN))
        assert isinstance(monitor.step(), UtilisationReport)
        assert not calls
    assert not layer.router._forward_hooks


def test_monitor_does_not_count_recomputation():
    layer, x = make(), torch.randn(10, HIDDEN, requires_grad=True)
    monitor = UtilisationMonitor(layer, every=1)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert sum(monitor.step().routers["router"].asked) == 20


def test_monitor_counts_a_compiled_model():
    layer, x = make(), torch.randn(10, HIDDEN)
    monitor = UtilisationMonitor(layer, every=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x)
        report = monitor.step()
    assert report.routers["router"].asked == tuple((2 * layer.route(x).asked_per_expert()).tolist())


def test_monitor_names_routers_that_did_not_run():
    monitor = UtilisationMonitor(nn.Sequential(make()), every=1)
    with pytest.raises(InputError, match=r"routers \['0.router'\] did not run in training since the last report"):
        monitor.step()


def test_a_dead_expert_is_revived_as_the_busiest_ones_twin():
    layer, x = skewed(), torch.randn(300, HIDDEN)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    monitor = UtilisationMonitor(layer, every=1)
    layer(x).square().sum().backward()
    optimizer.step()
    report = monitor.step()
    assert report.dead == {"router": (2,)}
    busiest = max(range(EXPERTS), key=lambda e: report.routers["router"].asked[e])
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for parameter in layer.parameters():
        optimizer.state[parameter]["exp_avg"] += 1
        optimizer.state[parameter]["exp_avg_sq"] += 1
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in layer.parameters()}
    assert revive_dead_experts(layer, report, optimizer=optimizer, noise=0.01) == [("router", 2, busiest)]
    for name, value in layer.state_dict().items():
        others = [e for e in range(EXPERTS) if e != 2]
        assert torch.equal(value[others], before[name][others]), "no other expert may change"
        model = before[name][busiest]
        noise = (value[2] - model).square().mean().sqrt().item()
        assert noise == (pytest.approx(0.01 * model.std(correction=0).item(), rel=0.8) if value.dim() > 1 else 0)
    for parameter in layer.parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 1
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            assert moment[2].abs().sum() == 0
        assert torch.equal(state["exp_avg"][others], moments[parameter][others])
    layer(x)
    assert 2 not in monitor.step().dead.get("router", ()), "the revived expert must be asked for"
    layer(x).square().sum().backward()
    optimizer.step()


def test_several_dead_experts_are_copies_of_different_ones():
    layer = make()
    report = UtilisationReport(1, {"router": RouterUtilisation((0, 9, 0, 7, 0, 8), (0, 2, 4), 2.0)}, math.inf)
    assert revive_dead_experts(layer, report, noise=0.0) == [("router", 0, 1), ("router", 2, 5), ("router", 4, 3)]
    for dead, donor in ((0, 1), (2, 5), (4, 3)):
        for parameter in layer.parameters():
            assert torch.equal(parameter[dead], parameter[donor])


def test_noise_is_the_same_on_every_rank():
    report = UtilisationReport(1, {"router": RouterUtilisation((0, 9, 1, 7, 1, 8), (0,), 2.0)}, math.inf)
    states = []
    for seed in (0, 0, 1):
        layer = make()
        torch.manual_seed(len(states))
        revive_dead_experts(layer, report, seed=seed)
        states.append(layer.experts.down_proj[0].detach())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


# Errors.


def test_wrong_arguments_are_named():
    layer, limited = make(), make(capacity_factor=1.0)
    with pytest.raises(InputError, match="no router of the model has a capacity"):
        CapacitySchedule(layer, 2, 1, 4)
    for factors in ((0, 1), (1, math.inf)):
        with pytest.raises(InputError, match="a factor must be a positive number"):
            CapacitySchedule(limited, *factors, 4)
    with pytest.raises(UnknownNameError, match="unknown curve 'cosin': did you mean 'cosine'"):
        CapacitySchedule(limited, 2, 1, 4, curve="cosin")
    with pytest.raises(InputError, match="steps must be a positive integer; got 0"):
        CapacitySchedule(limited, 2, 1, 0)
    for probability in (-0.1, 1.0):
        with pytest.raises(InputError, match="probability must be at least 0 and below 1"):
            ExpertDropout(layer, probability)
    for start, what, between in ((1, "experts", "2 and 6"), (7, "experts", "2 and 6"), (3, "top_k", "1 and 2")):
        with pytest.raises(InputError, match=f"start must be between {between} for TopKRouter.* got {start}"):
            ExpertWarmup(layer, start, 4, what=what)
    with pytest.raises(UnknownNameError, match="unknown what 'expert'"):
        ExpertWarmup(layer, 2, 4, what="expert")
    for options in ({"dead_below": 1.0}, {"max_imbalance": 0.5}):
        with pytest.raises(InputError, match="dead_below must be at least 0 and below 1"):
            UtilisationMonitor(layer, **options)
    with pytest.raises(InputError, match=r"Linear has no module that is a kpt_moe\.Router"):
        UtilisationMonitor(nn.Linear(2, 2))


def test_what_can_not_be_revived_is_named():
    layer = make()
    dead = RouterUtilisation((0, 9, 1, 7, 1, 8), (0,), 2.0)
    with pytest.raises(InputError, match=r"no layer with a router at 'other\.router'"):
        revive_dead_experts(layer, UtilisationReport(1, {"other.router": dead}, math.inf))
    with pytest.raises(InputError, match="noise must be a number of at least 0; got -1"):
        revive_dead_experts(layer, UtilisationReport(1, {"router": dead}, math.inf), noise=-1)
    fewer = RouterUtilisation((0, 9), (0,), 2.0)
    with pytest.raises(InputError, match="sharded, or not of 2 experts"):
        revive_dead_experts(layer, UtilisationReport(1, {"router": fewer}, math.inf))
    layer.experts = nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(
        InputError, match="knows LinearRouter with FeedForwardExpert; 'router' is TopKRouter with Linear"
    ):
        revive_dead_experts(layer, UtilisationReport(1, {"router": dead}, math.inf))


def test_monitor_does_not_count_what_compiled_code_repeats():
    layer, x = make(), torch.randn(10, HIDDEN, requires_grad=True)
    monitor = UtilisationMonitor(layer, every=1)
    compiled = torch.compile(layer, backend="aot_eager")
    checkpoint(lambda x: compiled(x).sin().exp(), x, use_reentrant=False).sum().backward()
    assert sum(monitor.step().routers["router"].asked) == 20


def test_monitor_counts_a_model_that_was_compiled_before():
    layer, x = make(), torch.randn(10, HIDDEN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x)
    monitor = UtilisationMonitor(layer, every=1)
    compiled(x)
    assert sum(monitor.step().routers["router"].asked) == 20


def test_experts_that_are_not_open_yet_are_not_dead():
    layer = make()
    ExpertWarmup(layer, 3, 10)
    monitor = UtilisationMonitor(layer, every=1)
    layer(torch.randn(300, HIDDEN))
    report = monitor.step()
    asked = report.routers["router"].asked
    assert asked[3:] == (0, 0, 0)
    assert not report.dead
    assert report.routers["router"].imbalance == pytest.approx(max(asked) / (sum(asked) / 3))


@pytest.mark.parametrize("router", [GShardRouter(HIDDEN, EXPERTS), HashRouter(HIDDEN, EXPERTS, 2, vocab_size=9)])
def test_a_fixed_number_of_experts_per_token_does_not_warm_up(router):
    with pytest.raises(InputError, match=f"{type(router).__name__} always has top_k=2"):
        ExpertWarmup(router, 1, 3, what="top_k")


@pytest.mark.parametrize("stages", [4, 7])
def test_capacity_in_stages_stays_within_what_torch_compiles_again(stages):
    layer, x = make(capacity_factor=1.0), torch.randn(10, HIDDEN)
    schedule = CapacitySchedule(layer, 2.0, 1.0, 28, stages=stages)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    seen = []
    for _ in range(30):
        compiled(x)
        seen.append(layer.router.capacity_factor)
        schedule.step()
    each = 28 // stages
    want = [2 - stage / stages for stage in range(stages) for _ in range(each)] + [1.0] * 2
    assert seen == pytest.approx(want)
    # Once more than there are values: after the first change torch tries the factor as a symbol.
    assert counter.frame_count <= stages + 2
    with pytest.raises(InputError, match="stages"):
        CapacitySchedule(layer, 2.0, 1.0, 3, stages=4)
