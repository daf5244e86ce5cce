"""What a router does with experts that can't be chosen."""

import math

import pytest
import torch
from torch.nn import functional as F

from kpt_moe import MoELayer, TopKRouter
from kpt_moe.losses import entropy_loss, switch_loss, z_loss
from scheduled import EXPERTS, HIDDEN, TOP_K, make, used


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
    layer = make(RefusesNothing(HIDDEN, num_experts=EXPERTS, top_k=TOP_K))
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
    asked = routing.asked_per_expert()[[1, 2, 4, 5]] / (20 * TOP_K)
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
