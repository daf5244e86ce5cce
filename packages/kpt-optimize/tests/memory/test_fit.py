"""Levels of activation checkpointing: predicted against measured memory, gradients, and the choice."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from kpt_conformance.checks.cost import peak_bytes
from kpt_core import InputError, UnknownNameError
from kpt_optimize.memory import LEVELS, checkpoint_blocks, compare_levels, estimate, fit
from kpt_optimize.memory.fit import remedies, state_bytes_8bit


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "features": x}


def dense():
    return Dense(), (torch.randn(4, 128, 64),)


def run(model, inputs):
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    out["loss"].backward()


def gradients(model, inputs):
    model.train().zero_grad()
    run(model, inputs)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def measured(model, inputs):
    """Bytes that a second step takes at most, beside parameters, buffers, inputs and the optimiser's state."""
    optimizer = AdamW(model.parameters())

    def step():
        run(model, inputs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return peak_bytes(torch.device("cpu"), step)


def test_each_level_is_predicted_and_changes_no_gradient():
    model, inputs = dense()
    check_levels(model, inputs)


def check_levels(model, inputs):
    plain = gradients(model, inputs)
    model.zero_grad()
    levels = compare_levels(model, inputs)
    assert [each.level for each in levels] == list(LEVELS)
    for each in levels:
        checkpoint_blocks(model, each.level)
        for name, grad in gradients(model, inputs).items():
            assert torch.equal(grad, plain[name]), (each.level, name)
        model.zero_grad()
        memory = each.memory
        predicted = memory.peak - memory.parameters - memory.buffers - memory.inputs - memory.optimizer_state
        assert predicted == pytest.approx(measured(copy.deepcopy(model), inputs), rel=0.1), each.level
    activations = [each.memory.activations for each in levels]
    assert activations == sorted(activations, reverse=True)
    assert activations[-1] < 0.6 * activations[0]
    flops = [each.flops for each in levels]
    assert flops[0] == flops[1] == 1
    assert flops == sorted(flops)
    assert 1.1 < flops[-1] < 1.34  # the last product of a block need not run again


@pytest.mark.parametrize("level", ["none", "products", "kernels"])  # of those that save as much the first
def test_a_fitting_step_gets_the_level_that_computes_least_again(level):
    model, inputs = dense()
    levels = {each.level: each for each in compare_levels(model, inputs)}
    room = levels[level].memory.peak
    found = fit(model, inputs, memory=room)
    assert found.level == level
    assert f"* {level}" in str(found)
    assert estimate(model, inputs).peak == room


def test_room_is_that_of_the_device_unless_it_is_told():
    model, inputs = dense()
    found = fit(model, inputs)
    assert found.level == "none"
    assert 1 << 28 < found.memory < 1 << 50
    with pytest.raises(InputError, match="'meta', which has no memory"):
        fit(model.to("meta"), inputs)


def test_nothing_is_changed_where_no_level_fits_and_it_says_what_else_would():
    model, inputs = dense()
    least = min((each.memory for each in compare_levels(model, inputs)), key=lambda each: each.peak)
    with pytest.raises(InputError, match=r"at level 'kernels', 1 B more.*AdamW8bit\): .*fully_shard.*batch of about"):
        fit(model, inputs, memory=least.peak - 1)
    assert not any("forward" in vars(block) for block in model.blocks)
    texts = remedies(model, least, 1)
    assert all("not enough alone" in text for text in texts[:3])
    assert not any("batch" in text for text in texts)


def test_levels_replace_one_another_and_none_is_what_was():
    model = Dense()
    own = model.blocks[0].forward
    model.blocks[0].forward = forward = lambda x: own(x)  # an attribute of the instance, which some libraries set
    for level in ("full", "kernels", "none"):
        checkpoint_blocks(model, level)
    assert model.blocks[0].forward is forward
    assert "forward" not in vars(model.blocks[1])
    copied = checkpoint_blocks(copy.deepcopy(model), "full", [Block])
    assert list(copied) == [f"blocks.{index}" for index in range(4)]


def test_eight_bit_states_are_counted_as_torchao_makes_them():
    optim = pytest.importorskip("torchao.optim.subclass_8bit")
    state = optim.OptimState8bit.zeros((64, 256))
    assert state_bytes_8bit(64 * 256, 4) == 2 * (state.codes.nbytes + state.scale.nbytes)
    assert state_bytes_8bit(1000, 2) == 4000


@pytest.mark.parametrize(
    ("model", "level", "error", "text"),
    [
        (Dense(), "some", UnknownNameError, "'some'"),
        (nn.Linear(3, 3), "full", InputError, "no nn.ModuleList"),
        (3, "full", InputError, "3"),
    ],
)
def test_wrong_input_is_refused(model, level, error, text):
    with pytest.raises(error, match=text):
        checkpoint_blocks(model, level)
