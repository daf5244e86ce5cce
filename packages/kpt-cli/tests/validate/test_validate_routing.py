"""Routing that flips is a finding of its own, explained by rounding or not; what follows is compared all the same."""

import pytest
import torch
from faulty_kernels import choose_the_worst, inputs, mixtral, patch_forward
from torch.nn import functional as F

from kpt_cli.validate.replaying import record, replay
from kpt_optimize.judging import find_routing, say_flips

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
    assert found.ok, [(verdict.key, verdict.reason) for verdict in found.failed]
    assert len(found.verdicts) == len(trace.layers)


def test_too_many_flips_fail_though_each_is_explained(tied):
    trace = record(tied, inputs(48))
    tokens = one_of_the_tied(trace)
    assert len(tokens) > 12
    nudge(tied, tokens, 1e-6)
    found = replay(tied, trace)
    assert found.failed == ()
    assert found.flipped > found.flips_allowed
    assert not found.ok


def test_a_flip_across_a_gap_is_not_explained():
    model = mixtral()
    trace = record(model, inputs())
    patch_forward(model.model.layers[1].mlp.gate, choose_the_worst(5))
    found = replay(model, trace)
    assert [(verdict.key, verdict.flips) for verdict in found.failed] == [("model.layers.1.mlp.gate", 1)]
    assert "1 tokens flipped, not by rounding: at token 5 float64's scores" in found.failed[0].reason
    assert found.flipped == 1


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
    assert [verdict.flips for verdict in found.verdicts if verdict.key == "model.layers.0.mlp.gate"] == [1]
    # It chose as float64 does.
    assert found.ok


@pytest.mark.parametrize(
    ("now", "was", "right", "gap"),
    [
        ([0, 1], [1, 0], [0, 1], None),  # the order of experts is no flip
        ([2, 3], [2, 1], [2, 3], None),  # as float64 chooses, though the recorder did not
        ([2, 1], [2, 3], [2, 3], "5.0e-01"),
        ([2, 1], [2, 3], [2, 0], None),  # scores that do not decide alone tell nothing
        ([2, 1], [2, -1], [2, 3], None),  # -1 is no expert
    ],
)
def test_gaps_between_scores(now, was, right, gap):
    scores = torch.tensor([[3.0, 2, 1, 0] if 0 in now else [0, 1, 3, 1.5]])
    reason = say_flips(*(torch.tensor([x]) for x in (now, was, right)), scores, scores, relative=1e-7)
    assert reason == "" if gap is None else f"exchanged experts lie {gap} apart" in reason


def test_what_is_a_routing():
    index, weights, logits = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2), torch.zeros(5, 8)
    found = find_routing([logits, weights, index])
    assert found is not None
    assert (found.experts, found.chosen, found.logits) == (2, (2, 1), 0)
    assert find_routing([torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, 8)]) is None
    assert find_routing([]) is None
