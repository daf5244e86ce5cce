"""A small transformer with experts that reads bytes, and the text it is trained on: what `moe_training.py` trains."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kpt_cli.demo.corpus import Source, read_corpus
from kpt_moe import MoEConfig, MoELayer

#: Bytes are the vocabulary.
VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model and its training.

    Attributes:
        steps: of the optimizer.
        judged: last steps over which the load is averaged.
        batch: sequences of a global batch.
        context: bytes of a sequence.
        held_out: sequences of held-out text that are evaluated after training.
        balancing_rate: of `BiasBalancer`.
    """

    steps: int = 500
    judged: int = 50
    layers: int = 2
    hidden_size: int = 64
    heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    intermediate_size: int = 64
    batch: int = 16
    context: int = 64
    held_out: int = 256
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    balancing_rate: float = 2e-3
    seed: int = 0


class Block(nn.Module):
    """Causal attention and a Mixture-of-Experts layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.heads = sizes.heads
        self.before_attention, self.before_experts = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.moe = MoELayer(
            MoEConfig(
                hidden_size=width,
                num_experts=sizes.num_experts,
                top_k=sizes.top_k,
                intermediate_size=sizes.intermediate_size,
                score="sigmoid",
                router_options={"correction_bias": True},
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden_size]` to the same."""
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.moe(self.before_experts(x))
        return out


class LanguageModel(nn.Module):
    """A transformer on bytes with learned positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, sizes.hidden_size)
        self.position = nn.Embedding(sizes.context, sizes.hidden_size)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.hidden_size)
        self.head = nn.Linear(sizes.hidden_size, VOCABULARY, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean loss, nats per byte, of predicting each next byte in windows `[batch, context + 1]`."""
        seen, wanted = windows[:, :-1], windows[:, 1:]
        x = self.byte(seen) + self.position.weight[: seen.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Text:
    """The bytes to train on and those held out."""

    def __init__(self, sizes: Sizes) -> None:
        corpus = read_corpus()
        self.sizes = sizes
        self.training, self.held_out = _joined(corpus.training), _joined(corpus.held_out)

    def batch(self, step: int) -> Tensor:
        """The global batch of a step, `[batch, context + 1]`: windows at random places."""
        random = torch.Generator().manual_seed(self.sizes.seed * 1_000_003 + step)
        last = len(self.training) - self.sizes.context - 1
        return self._windows(self.training, torch.randint(last, (self.sizes.batch,), generator=random))

    def evaluation(self) -> Tensor:
        """Windows spread evenly over the held-out text, `[held_out, context + 1]`."""
        last = len(self.held_out) - self.sizes.context - 1
        return self._windows(self.held_out, torch.linspace(0, last, self.sizes.held_out).long())

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "text": "sources of Python's standard library, as kpt_cli.demo.corpus reads them",
            "training_bytes": len(self.training),
            "held_out_bytes": len(self.held_out),
            "sha256": hashlib.sha256(self.training.numpy().tobytes()).hexdigest(),
        }

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts.unsqueeze(1) + torch.arange(self.sizes.context + 1)].long()


def _joined(sources: tuple[Source, ...]) -> Tensor:
    return torch.frombuffer(bytearray("\n".join(source.text for source in sources).encode()), dtype=torch.uint8)
