"""Routing that flips is a finding of its own, explained by rounding or not; what follows is compared all the same."""

import pytest
import torch
from faulty_kernels import choose_the_worst, inputs, mixtral, patch_forward
from torch.nn import functional as F

from kpt_cli.validate.recording import record
from kpt_cli.validate.replaying import replay
from kpt_cli.validate.routing import find_flips, find_routing

LEFT, RIGHT = 0, 1


@pytest.fixture
def tied():
    """A Mixtral in whose layer 1 two experts, which do quite different things, get nearly the same score."""
    model = mixtral()
    with torch.no_grad():
        weight = model.model.layers[1].mlp.gate.weight
        weight[RIGHT] = weight[LEFT] * (1 - 2**-22)
    return model


def one_of_the_tied(trace):
    """Tokens that one of the two experts, and not the other, serves."""
    gate = next(layer for layer in trace.layers if layer.key == "model.layers.1.mlp.gate")
    index = gate.outputs[2]
    return ((index == LEFT).any(-1) != (index == RIGHT).any(-1)).nonzero().flatten()


def nudge(model, tokens, size):
    """Change the scores of the two experts for some tokens, so that the other one of them is chosen."""
    gate = model.model.layers[1].mlp.gate

    def forward(hidden_states):
        logits = F.linear(hidden_states.reshape(-1, 32), gate.weight)
        other = logits[tokens][:, [RIGHT, LEFT]]
        step = size * torch.tensor([1.0, -1.0]) * (1.0 if logits[tokens[0], LEFT] > logits[tokens[0], RIGHT] else -1.0)
        logits[tokens[:, None], torch.tensor([RIGHT, LEFT])] = (other + step).to(logits.dtype)
        values, index = logits.softmax(-1).topk(2, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), index

    gate.forward = forward


def test_a_flip_of_a_near_tie_is_explained_and_all_that_follows_is_compared(tied):
    trace = record(tied, inputs())
    nudge(tied, one_of_the_tied(trace)[:2], 1e-6)
    found = replay(tied, trace)
    assert found.flipped >= 1
    assert found.unexplained == 0
    assert found.ok, [(verdict.key, verdict.reason) for verdict in found.failed]
    assert len(found.verdicts) == len(trace.layers)


def test_too_many_flips_fail_though_each_is_explained(tied):
    trace = record(tied, inputs(48))
    tokens = one_of_the_tied(trace)
    assert len(tokens) > 12
    nudge(tied, tokens, 1e-6)
    found = replay(tied, trace)
    assert found.unexplained == 0
    assert found.failed == ()
    assert found.flipped > found.flips_allowed
    assert not found.ok


def test_a_flip_across_a_gap_is_not_explained():
    model = mixtral()
    trace = record(model, inputs())
    patch_forward(model.model.layers[1].mlp.gate, choose_the_worst(5))
    found = replay(model, trace)
    assert [(verdict.key, [flip.token for flip in verdict.flips]) for verdict in found.verdicts if verdict.flips] == [
        ("model.layers.1.mlp.gate", [5])
    ]
    assert found.unexplained == 1
    assert found.failed == ()
    assert not found.ok


def test_gradients_are_left_out_after_a_flip(tied):
    trace = record(tied, inputs(), gradients=True)
    nudge(tied, one_of_the_tied(trace)[:2], 1e-6)
    found = replay(tied, trace)
    assert "routed otherwise" in found.gradients_left_out
    assert not any(verdict.type == "gradient" for verdict in found.verdicts)


def test_the_reference_follows_the_recorder_where_it_flipped():
    model = mixtral(torch.bfloat16)
    patch_forward(model.model.layers[0].mlp.gate, choose_the_worst(5), (torch.bfloat16,))
    trace = record(model, inputs())
    logits = trace.layers[-1]
    assert logits.key == ""
    error = (logits.outputs[0].double() - logits.reference[0]).abs().max()
    assert error < 0.1 * logits.reference[0].abs().max()
    sound = mixtral(torch.bfloat16)
    found = replay(sound, trace)
    assert [len(verdict.flips) for verdict in found.verdicts if verdict.key == "model.layers.0.mlp.gate"] == [1]
    # It chose as float64 does.
    assert found.ok


def test_the_order_of_experts_is_no_flip():
    index, other = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 0], [2, 1]])
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 3, 1.5]])
    (flip,) = find_flips(index, other, logits.topk(2).indices, logits, limit=0.1)
    # The recorder went to expert 1 (score 1) and this run to 3 (score 1.5), which float64 would choose: no gap.
    assert (flip.token, flip.gap, flip.explained) == (1, -0.5, True)


def test_scores_that_do_not_decide_alone_give_no_gap():
    index, other = torch.tensor([[0, 1]]), torch.tensor([[0, 2]])
    (flip,) = find_flips(index, other, torch.tensor([[0, 2]]), torch.tensor([[3.0, 2, 1, 0]]), limit=0.0)
    assert flip.gap is None


def test_what_is_a_routing():
    index, weights, logits = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2), torch.zeros(5, 8)
    found = find_routing([logits, weights, index])
    assert found is not None
    assert (found.index, found.weights, found.logits) == (2, (1,), 0)
    assert find_routing([torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, 8)]) is None
    assert find_routing([]) is None
