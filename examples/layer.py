"""Train a Mixture-of-Experts layer on a toy task, compiled without a graph break, and show which kernel served it."""

import torch

import kpt_core
from kpt_moe import MoEConfig, MoELayer

torch.manual_seed(0)
layer = MoELayer(MoEConfig(hidden_size=32, num_experts=8, top_k=2, intermediate_size=64))
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
target = torch.nn.Linear(32, 32).requires_grad_(False)
step = torch.compile(layer, fullgraph=True, backend="aot_eager")

for i in range(101):
    x = torch.randn(256, 32)
    loss = torch.nn.functional.mse_loss(step(x), target(x))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 25 == 0:
        print(f"step {i:3d}: loss {loss.item():.4f}")

with kpt_core.record() as selections, torch.no_grad():
    layer(torch.randn(4, 32))
print(*selections, sep="\n")
