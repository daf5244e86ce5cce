"""Train a Mixture-of-Experts layer with its experts spread over ranks, and compare with a single process.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    python examples/expert_parallel.py

Each rank holds a part of the experts and sees a part of the tokens.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kpt_moe import MoEConfig, MoELayer
from kpt_moe.parallel import average_gradients, parallelize_experts

STEPS, TOKENS = 5, 128


def layer() -> MoELayer:
    """The same on every rank, since the seed is."""
    torch.manual_seed(0)
    return MoELayer(MoEConfig(hidden_size=32, num_experts=8, top_k=2, intermediate_size=64))


def batch(step: int) -> torch.Tensor:
    """The tokens of all ranks."""
    return torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(step))


def main() -> None:
    """Train both ways and print both losses."""
    # torchrun sets these; alone, this is a world of one rank.
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    # A rank that ends raises on the others after this long at most.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))

    spread, single = parallelize_experts(layer(), mesh["ep"], chunks=2), layer()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (spread, single)]
    for step in range(STEPS):
        x = batch(step)
        mine = x.chunk(mesh.size())[mesh.get_local_rank()]
        loss = (spread(mine) - mine.flip(1)).square().mean()
        expected = (single(x) - x.flip(1)).square().mean()
        loss.backward()
        expected.backward()
        average_gradients(spread, mesh)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach() / mesh.size()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.6f} on {mesh.size()} ranks, {expected:.6f} in a single process")
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
