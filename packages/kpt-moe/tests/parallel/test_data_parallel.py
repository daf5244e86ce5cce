"""Gradients that only some ranks have; copies of spread networks, and where what they save is kept."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.offload import checkpoint_experts, offload_experts
from kpt_moe.parallel import average_gradients, parallelize_experts


class Either(nn.Module):
    """Two ways to the experts, and one that nobody goes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.moe = MoELayer(MoEConfig(hidden_size=4, num_experts=4, top_k=2, intermediate_size=6))

    def forward(self, x, way):
        return self.moe(self.ways[way](x))


def tokens(rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def averages_what_some_ranks_have(rank):
    mesh = init_device_mesh("cpu", (2,))
    spread, alone = parallelize_experts(Either(), mesh), Either()
    spread(tokens(rank), rank).square().sum().backward()
    average_gradients(spread, mesh)
    (sum(alone(tokens(way), way).square().sum() for way in range(2)) / 2).backward()
    for (name, ours), theirs in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == name.startswith("ways.2"), name
        if ours.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


def copies_are_spread_and_independent(rank):
    spread = parallelize_experts(Either(), init_device_mesh("cpu", (2,)))
    want = spread(tokens(rank), 0)
    twin = copy.deepcopy(spread)
    with torch.no_grad():
        for parameter in spread.parameters():
            parameter.zero_()
    assert torch.equal(twin(tokens(rank), 0), want)
    assert type(twin.moe.experts) is type(spread.moe.experts)


def keeps_its_parameters_here(rank):
    """What a spread network saves goes to the host but for its parameters."""
    spread = parallelize_experts(Either(), init_device_mesh("cpu", (2,)))
    checkpoint_experts(spread, "offload")
    to_host, empty_like = [], torch.empty_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda t, **options: to_host.append(t.dim()) or empty_like(t, **options))
        spread(tokens(rank), 0)
    assert 2 in to_host
    assert 3 not in to_host


def refuses_to_offload(rank):
    spread = parallelize_experts(Either(), init_device_mesh("cpu", (2,)))
    with pytest.raises(InputError, match=r"moe\.experts is spread over ranks"):
        offload_experts(spread, "100%")
    assert spread.moe.experts.down_proj.shape == (4, 4, 6)


def on_two(rank):
    averages_what_some_ranks_have(rank)
    copies_are_spread_and_independent(rank)
    keeps_its_parameters_here(rank)
    refuses_to_offload(rank)
    return True


def test_gradients_of_some_ranks_copies_and_memory(launch):
    assert launch(2, on_two) == [True, True]
