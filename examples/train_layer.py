"""Train a small transformer with Mixture-of-Experts blocks on a text, its load balanced in two ways and in none.

Balancing losses are added to the task's loss and pull at the router's weights; a balancer moves a bias by which experts
are chosen, and leaves gradients alone.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe import BiasBalancer, MoEConfig, MoELayer, RouterStatistics, Routing
from kpt_moe.losses import switch_loss, z_loss

TEXT = (
    """Whether a token goes to one expert or to another is decided by a router. Whatever the router decides, the
experts that are asked often learn fast, and are asked more often for it; the others learn nothing. A loss that grows
with the imbalance, or a bias that falls with the load, keeps all of them at work. """
    * 4
)
VOCABULARY = sorted(set(TEXT))
STEPS, BATCH, LENGTH, HIDDEN = 90, 8, 48, 48


class Block(nn.Module):
    """Attention, then a layer of experts instead of one feed-forward network."""

    def __init__(self, *, correction_bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        options = {"correction_bias": correction_bias}
        self.moe = MoELayer(
            MoEConfig(hidden_size=HIDDEN, num_experts=8, top_k=2, intermediate_size=64, router_options=options)
        )

    def forward(self, x: Tensor, causal: Tensor) -> tuple[Tensor, Routing]:
        """Tokens, and the routing for the losses."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, attn_mask=causal, need_weights=False)[0]
        h = self.norms[1](x)
        routing = self.moe.route(h)
        return x + self.moe(h, routing), routing


class Model(nn.Module):
    """A stack of blocks over characters."""

    def __init__(self, *, correction_bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), HIDDEN)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.blocks = nn.ModuleList([Block(correction_bias=correction_bias) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, len(VOCABULARY))

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Logits of the next characters, and what the routers decided."""
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x, routings = self.embedding(ids) + self.position, []
        for block in self.blocks:
            x, routing = block(x, causal)
            routings.append(routing)
        return self.head(x), routings


def train(balance: str) -> None:
    """Train a model from the same start and print its loss and the imbalance of its experts."""
    torch.manual_seed(0)
    model = Model(correction_bias=balance == "bias")
    balancer = BiasBalancer(model, rate=0.01) if balance == "bias" else None
    statistics = RouterStatistics(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.tensor([VOCABULARY.index(character) for character in TEXT])
    print(f"balanced by {balance}:")
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        windows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        logits, routings = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        auxiliary = sum(0.1 * switch_loss(routing) + 1e-3 * z_loss(routing) for routing in routings)
        (loss + auxiliary if balance == "losses" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if balancer is not None:
            balancer.step()
        if step % 30 == 0:
            summaries = statistics.snapshot().values()
            shown = ", ".join(f"{summary.imbalance:.2f}" for summary in summaries)
            print(f"  step {step:3d}: loss {loss.item():.3f}, load of the busiest expert over the mean: {shown}")
            statistics.reset()


for way in ("nothing", "losses", "bias"):
    train(way)
