"""Watching which experts are used, and reviving dead ones."""

import pytest
import torch
from torch import nn

from kpt_core import InputError
from kpt_moe import MoELayer
from kpt_moe.scheduling import (
    ExpertWarmup,
    UtilisationMonitor,
    revive_dead_experts,
)
from kpt_moe.statistics import RouterSummary
from scheduled import EXPERTS, HIDDEN, TOP_K, make


def summary(asked: tuple[int, ...], dead: tuple[int, ...]) -> RouterSummary:
    return RouterSummary(sum(asked), asked, asked, 0, (), 2.0, 0.0, 0.0, dead)


def skewed(seldom: int = 2) -> MoELayer:
    """A layer one of whose experts no token of `tokens()` asks for."""
    layer = make(bias=True, correction_bias=True)
    with torch.no_grad():
        layer.router.bias[seldom] = -100.0
        layer.router.correction_bias.uniform_(0, 0.01)
    return layer


def test_monitor_reports_what_was_asked_for():
    model, reports = nn.Sequential(make(), skewed()), []
    monitor = UtilisationMonitor(model, reports.append, every=3)
    x, want = torch.randn(3, 40, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int64)
    for t, part in enumerate(x):
        want += model[0].route(part).asked_per_expert()
        model[1](part)
        model.eval()
        model(part)
        model.train()
        assert (monitor.step() is None) == (t < 2)
    (report,) = reports
    assert report["0.router"].asked == tuple(want.tolist())
    assert report["0.router"].imbalance == pytest.approx(want.max().item() / want.float().mean().item())
    assert {path: router.dead for path, router in report.items()} == {"0.router": (), "1.router": (2,)}
    model(x[0])
    for _ in range(3):
        again = monitor.step()
    assert sum(again["0.router"].asked) == 40 * TOP_K, "a report begins anew"


def test_monitor_calls_back_only_where_something_is_wrong():
    layer, calls = make(), []
    with UtilisationMonitor(layer, calls.append, every=1) as monitor:
        layer(torch.randn(200, HIDDEN))
        assert list(monitor.step()) == ["router"]
        assert not calls
    assert not layer.router._forward_hooks


def test_monitor_leaves_out_routers_that_did_not_run():
    model = nn.Sequential(make(), make())
    monitor = UtilisationMonitor(model, every=1)
    with pytest.raises(InputError, match="no router ran in training since the last report"):
        monitor.step()
    model[1](torch.randn(3, HIDDEN))
    assert list(monitor.step()) == ["1.router"]


def test_a_dead_expert_is_revived_as_the_busiest_ones_twin():
    layer, x = skewed(), torch.randn(300, HIDDEN)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    monitor = UtilisationMonitor(layer, every=1)
    layer(x).square().sum().backward()
    optimizer.step()
    report = monitor.step()
    assert report["router"].dead == (2,)
    busiest = max(range(EXPERTS), key=lambda e: report["router"].asked[e])
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
    assert 2 not in monitor.step()["router"].dead, "the revived expert must be asked for"
    layer(x).square().sum().backward()
    optimizer.step()


def test_several_dead_experts_are_copies_of_different_ones():
    layer = make()
    report = {"router": summary((0, 9, 0, 7, 0, 8), (0, 2, 4))}
    assert revive_dead_experts(layer, report, noise=0.0) == [("router", 0, 1), ("router", 2, 5), ("router", 4, 3)]
    for dead, donor in ((0, 1), (2, 5), (4, 3)):
        for parameter in layer.parameters():
            assert torch.equal(parameter[dead], parameter[donor])


def test_experts_that_are_not_open_yet_are_copied_to_none():
    layer = make()
    ExpertWarmup(layer, 4, 10)
    report = {"router": summary((0, 9, 0, 0, 0, 0), (0, 2, 3))}
    assert revive_dead_experts(layer, report) == [("router", 0, 1), ("router", 2, 1), ("router", 3, 1)]


def test_noise_is_the_same_on_every_rank():
    report = {"router": summary((0, 9, 1, 7, 1, 8), (0,))}
    states = []
    for seed in (0, 0, 1):
        layer = make()
        torch.manual_seed(len(states))
        revive_dead_experts(layer, report, seed=seed)
        states.append(layer.experts.down_proj[0].detach())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_wrong_arguments_of_a_monitor_are_named():
    layer = make()
    with pytest.raises(InputError, match="dead_below must be at least 0 and below 1; got 1"):
        UtilisationMonitor(layer, dead_below=1.0)
    with pytest.raises(InputError, match=r"Linear has neither a kpt_moe\.routers\.Router nor"):
        UtilisationMonitor(nn.Linear(2, 2))


def test_what_can_not_be_revived_is_named():
    layer = make()
    dead = summary((0, 9, 1, 7, 1, 8), (0,))
    with pytest.raises(InputError, match=r"no layer with a router at 'other\.router'"):
        revive_dead_experts(layer, {"other.router": dead})
    with pytest.raises(InputError, match="noise must be at least 0; got -1"):
        revive_dead_experts(layer, {"router": dead}, noise=-1)
    fewer = summary((0, 9), (0,))
    with pytest.raises(InputError, match="sharded, or not of 2 experts"):
        revive_dead_experts(layer, {"router": fewer})
    layer.experts = nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(
        InputError, match="knows LinearRouter with FeedForwardExpert; 'router' is TopKRouter with Linear"
    ):
        revive_dead_experts(layer, {"router": dead})


def test_experts_that_are_not_open_yet_are_not_dead():
    layer = make()
    ExpertWarmup(layer, 3, 10)
    monitor = UtilisationMonitor(layer, every=1)
    layer(torch.randn(300, HIDDEN))
    report = monitor.step()
    asked = report["router"].asked
    assert asked[3:] == (0, 0, 0)
    assert not report["router"].dead
    assert report["router"].imbalance == pytest.approx(max(asked) / (sum(asked) / 3))
