"""How good a model is on held-out text, how far two models differ, and which experts the text goes to."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Windows of one forward.
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A model on held-out text.

    Attributes:
        loss: mean cross-entropy, in nats a token.
        perplexity: its exponential.
        bits_per_byte: the same without the tokenizer, so that models with other tokenizers compare.
        tokens: that were predicted.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two models on the same held-out text.

    Attributes:
        largest: difference of a logit.
        relative: that, as a share of the largest logit.
        same_choice: share of positions where both would choose the same next token.
    """

    largest: float
    relative: float
    same_choice: float


def windows(tokens: Tensor, context: int, count: int) -> Tensor:
    """The stream's first windows, one after the other: `[count, context]`, fewer if it is shorter."""
    count = max(1, min(count, len(tokens) // context))
    return tokens[: count * context].view(count, -1)


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, context: int, count: int) -> float:
    """Mean cross-entropy of a model over some windows, in nats a token; the model is left in evaluation mode."""
    model.eval()
    total = 0.0
    rows = windows(tokens, context, count)
    for batch in rows.split(BATCH):
        output: Any = model(input_ids=batch, labels=batch, output_router_logits=False, use_cache=False)
        total += output.loss.item() * len(batch)
    return total / len(rows)


def quality(model: nn.Module, tokens: Tensor, context: int, count: int, bytes_per_token: float) -> Quality:
    """Measure a model on held-out text."""
    loss = mean_loss(model, tokens, context, count)
    rows = windows(tokens, context, count)
    return Quality(
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) / bytes_per_token,
        tokens=rows.numel() - len(rows),
    )


@torch.no_grad()
def difference(before: nn.Module, after: nn.Module, tokens: Tensor, context: int, count: int) -> Difference:
    """Compare the logits of two models."""
    largest = scale = 0.0
    same = positions = 0
    for batch in windows(tokens, context, count).split(BATCH):
        old, new = (model(input_ids=batch, use_cache=False).logits.float() for model in (before, after))
        largest = max(largest, (new - old).abs().max().item())
        scale = max(scale, old.abs().max().item())
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
        positions += batch.numel()
    return Difference(largest=largest, relative=largest / max(scale, 1e-30), same_choice=same / positions)


@torch.no_grad()
def expert_load(model: nn.Module, tokens: Tensor, context: int, count: int) -> list[list[float]]:
    """The share of each layer's router decisions that went to each expert, on held-out text."""
    config: Any = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for batch in windows(tokens, context, count).split(BATCH):
        output: Any = model(input_ids=batch, output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=config.num_experts)
    shares: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return shares
