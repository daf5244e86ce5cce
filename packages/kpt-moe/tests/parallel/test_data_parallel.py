"""Gradients that only some ranks have, and copies of spread networks."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from kpt_moe import MoEConfig, MoELayer
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


def on_two(rank):
    averages_what_some_ranks_have(rank)
    copies_are_spread_and_independent(rank)
    return True


def test_gradients_of_some_ranks_and_copies(launch):
    assert launch(2, on_two) == [True, True]
