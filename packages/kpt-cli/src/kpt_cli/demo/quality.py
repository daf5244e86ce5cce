"""How good a model is on held-out text, how far two models differ, and which experts the text goes to."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    @classmethod
    def of(cls, loss: float, tokens: int, bytes_per_token: float) -> "Quality":
        """Derive all of it from a mean loss."""
        return cls(
            loss=loss,
            # Beyond this the exponential is no number any more, and the model has learnt nothing.
            perplexity=math.exp(min(loss, 700.0)),
            bits_per_byte=loss / math.log(2) / bytes_per_token,
            tokens=tokens,
        )


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


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each window's next tokens, in nats a token.

    Args:
        logits: `[windows, context, vocabulary]`.
        tokens: `[windows, context]`.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Mean cross-entropy of a model over windows `[windows, context]`; the model is left in evaluation mode."""
    model.eval()
    total = 0.0
    for batch in rows.split(BATCH):
        total += next_token_loss(model(input_ids=batch, use_cache=False).logits, batch).item() * len(batch)
    return total / len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityComparison:
    """Two models on the same held-out text.

    Attributes:
        before: the model as it was.
        after: the model with the plan applied.
        difference: of their logits.
        expert_load: share of each layer's router decisions that went to each expert, in the model as it was.
    """

    before: Quality
    after: Quality
    difference: Difference
    expert_load: list[list[float]]


@torch.no_grad()
def compare_quality(
    before: nn.Module, after: nn.Module, rows: Tensor, bytes_per_token: float, on_batch: Callable[[int, int], None]
) -> QualityComparison:
    """Read held-out text with two models.

    Args:
        before: the model as it was.
        after: the model with the plan applied.
        rows: `[windows, context]` token ids.
        bytes_per_token: of the held-out text.
        on_batch: called with (windows read, windows in all).
    """
    config: Any = before.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    losses = {"before": 0.0, "after": 0.0}
    largest = scale = 0.0
    same = done = 0
    for batch in rows.split(BATCH):
        on_batch(done, len(rows))
        output: Any = before(input_ids=batch, output_router_logits=True, use_cache=False)
        old, new = output.logits.float(), after(input_ids=batch, use_cache=False).logits.float()
        losses["before"] += next_token_loss(old, batch).item() * len(batch)
        losses["after"] += next_token_loss(new, batch).item() * len(batch)
        largest = max(largest, (new - old).abs().max().item())
        scale = max(scale, old.abs().max().item())
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=config.num_experts)
        done += len(batch)
    on_batch(done, done)
    old_quality, new_quality = (
        Quality.of(total / len(rows), rows.numel() - len(rows), bytes_per_token) for total in losses.values()
    )
    shares: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return QualityComparison(
        before=old_quality,
        after=new_quality,
        difference=Difference(largest=largest, relative=largest / max(scale, 1e-30), same_choice=same / rows.numel()),
        expert_load=shares,
    )
