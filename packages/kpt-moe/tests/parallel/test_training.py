"""Training on text with experts spread over ranks: the losses are those of one process, step by step."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from kpt_moe import BiasBalancer, MoEConfig, MoELayer, RouterStatistics
from kpt_moe.parallel import average_gradients, clip_grad_norm, parallelize_experts

HIDDEN, HEADS, BATCH, CONTEXT, STEPS, RANKS = 16, 2, 8, 32, 20, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_experts = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.moe = MoELayer(
            MoEConfig(
                hidden_size=HIDDEN,
                num_experts=8,
                intermediate_size=16,
                score="sigmoid",
                router_options={"correction_bias": True},
            )
        )

    def forward(self, x):
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.moe(self.before_experts(x))


class LanguageModel(nn.Sequential):
    """Predicts the next byte of a text."""

    def __init__(self):
        super().__init__(nn.Embedding(256, HIDDEN), Block(), Block(), nn.Linear(HIDDEN, 256))

    def loss(self, windows):
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def text():
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(content, step):
    starts = torch.randint(len(content) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return content[starts + torch.arange(CONTEXT + 1)]


def train(rank=None, chunks=1):
    """Losses, and how often each expert was asked for, of every step; on one rank's part of each batch or on all."""
    torch.manual_seed(0)
    # float64, so that no rounding flips a choice between experts.
    model, content, mesh, part = LanguageModel().double(), text(), None, slice(None)
    if rank is not None:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        parallelize_experts(model, mesh, chunks=chunks)
        part = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = BiasBalancer(model, rate=1e-2, group=mesh.get_group() if mesh else None)
    losses, loads = [], []
    with RouterStatistics(model) as statistics:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(batch(content, step)[part])
            loss.backward()
            if mesh is not None:
                average_gradients(model, mesh)
            clip_grad_norm(model, 1.0)
            optimizer.step()
            balancer.step()
            losses.append(loss.detach())
            statistics.all_reduce()
            loads.append([router.asked for router in statistics.snapshot().values()])
            statistics.reset()
    losses = torch.stack(losses)
    if mesh is not None:
        dist.all_reduce(losses)
        losses /= RANKS
    return losses, loads


def train_on_rank(rank):
    return [train(rank, chunks) for chunks in (1, 2)]


def test_two_ranks_follow_the_loss_curve_of_one_process(launch):
    expected, expected_loads = train()
    assert expected[-1] < expected[0] - 1
    assert {sum(layer) for step in expected_loads for layer in step} == {BATCH * CONTEXT * 2}
    for of_rank in launch(RANKS, train_on_rank):
        for losses, loads in of_rank:
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
            assert loads == expected_loads
