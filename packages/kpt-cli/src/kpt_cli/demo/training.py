"""Training: AdamW, a warm-up and a cosine, clipped gradients, and a loss that keeps every expert in use."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .model import BALANCE_WEIGHT
from .quality import mean_loss, next_token_loss, windows
from .sizes import Size

WARM_UP_STEPS = 40
#: What is left of the peak learning rate at the end.
FINAL_SHARE = 0.05
WEIGHT_DECAY = 0.1
CLIP = 1.0


@dataclass(slots=True)
class TrainingLog:
    """What happened.

    Attributes:
        losses: cross-entropy of each step's batch, in nats a token.
        balance: load-balancing loss of each step; the number of experts per token is the perfect balance.
        held_out: (steps done, loss on held-out text).
        tokens: that were trained on, counting repeats.
        seconds: that this took, without the evaluations.
    """

    losses: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


#: Called after every step with the log so far and the share of training that is done.
OnStep = Callable[[TrainingLog, float], None]


def train(
    model: nn.Module,
    tokens: Tensor,
    held_out: Tensor,
    size: Size,
    *,
    seed: int,
    steps: int | None,
    seconds: float | None,
    on_step: OnStep,
) -> TrainingLog:
    """Train a model.

    Args:
        model: a causal language model of transformers.
        tokens: the stream to learn from; windows begin anywhere in it.
        held_out: the stream to evaluate with.
        size: of the demo.
        seed: decides the windows. With the same seed, machine and number of threads, every loss is the same bit by bit.
        steps: how many, None to go by time.
        seconds: how long, instead: then the losses depend on the machine's speed.
        on_step: is told how it goes.
    """
    optimizer = _optimizer(model, size.peak_learning_rate)
    generator = torch.Generator().manual_seed(seed)
    held_out = windows(held_out, size.context, size.held_out_windows)
    log = TrainingLog()
    done = 0.0
    evaluated = 0
    log.held_out.append((0, mean_loss(model, held_out)))
    model.train()
    while done < 1:
        start = time.perf_counter()
        _set_learning_rate(optimizer, size.peak_learning_rate * _schedule(len(log.losses), done))
        batch = _batch(tokens, size, generator)
        output: Any = model(input_ids=batch, output_router_logits=True, use_cache=False)
        loss = next_token_loss(output.logits, batch)
        balance = _balance(output.router_logits, size)
        optimizer.zero_grad()
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        log.losses.append(loss.item())
        log.balance.append(balance.item())
        log.tokens += batch.numel()
        log.seconds += time.perf_counter() - start
        done = len(log.losses) / steps if steps is not None else log.seconds / (seconds or 1)
        if int(done * size.evaluations) > evaluated or done >= 1:
            evaluated = int(done * size.evaluations)
            log.held_out.append((len(log.losses), mean_loss(model, held_out)))
            model.train()
        on_step(log, min(done, 1.0))
    model.eval()
    return log


def _optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; gains of norms are not decayed, since a small gain is not a simpler model."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _schedule(step: int, done: float) -> float:
    cosine = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return min((step + 1) / WARM_UP_STEPS, cosine)


def _balance(router_logits: Sequence[Tensor], size: Size) -> Tensor:
    """The load-balancing loss of each layer, on average.

    Not the model's own `aux_loss`, which sees all layers as one: there a layer may send everything to one expert if
    another layer makes up for it.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    losses: list[Any] = [
        load_balancing_loss_func((logits,), size.experts, size.experts_per_token) for logits in router_logits
    ]
    return torch.stack(losses).mean()


def _batch(tokens: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(tokens) - size.context, (size.batch, 1), generator=generator)
    return tokens[starts + torch.arange(size.context)]
