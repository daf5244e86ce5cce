"""A small Qwen3-MoE, made from its config, trained, saved and loaded the way every Hugging Face model is."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_cli.errors import CliError
from kpt_cli.optimize.model import quiet_transformers as quiet_transformers

from .settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

BALANCE_WEIGHT = 0.01  #: weight of the load-balancing loss, which keeps the router from using a few experts only
#: Of the initial weights. Larger than the usual 0.02, with which so narrow a model takes hundreds of steps to begin.
INITIAL_DEVIATION = 0.05
#: Beyond a training window too: rotary positions reach further, and speed is measured with longer prompts.
LONGEST = 1024
WARM_UP_STEPS = 40
FINAL_SHARE = 0.05  #: what is left of the peak learning rate at the end
WEIGHT_DECAY = 0.1
CLIP = 1.0
WINDOWS = 16  #: windows of one forward without gradients


def new_model(settings: Settings, seed: int, **options: str) -> "Qwen3MoeForCausalLM":
    """Make a model with random weights; without options, transformers' own default serves experts and attention."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kpt_moe.transformers  # noqa: F401  registers the experts implementation "kpt"

    config = Qwen3MoeConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        moe_intermediate_size=settings.expert_size,
        norm_topk_prob=True,
        initializer_range=INITIAL_DEVIATION,
        router_aux_loss_coef=BALANCE_WEIGHT,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    make: Any = Qwen3MoeForCausalLM._from_config
    model: Qwen3MoeForCausalLM = make(config, **options)
    return model


def save_model(model: "Qwen3MoeForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write weights, config and tokenizer to a new folder."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # safetensors and tokenizers have their own errors for a full disk
        raise CliError(f"the model could not be written: {error}; make room or choose another folder") from error


def load_model(folder: Path, **options: str) -> Any:
    """Load a model as its user would: without options, transformers' own default serves experts and attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()


def describe(model: "Qwen3MoeForCausalLM", settings: Settings) -> dict[str, Any]:
    """Return what the report says of a model."""
    parameters = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * (settings.experts - settings.experts_per_token) // settings.experts
    return {
        "architecture": type(model).__name__,
        "parameters": parameters,
        "active_parameters": parameters - idle,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def windows(tokens: Tensor, context: int, count: int) -> Tensor:
    """Return the stream's first windows, one after the other: `[count, context]`, fewer if it is shorter."""
    count = max(1, min(count, len(tokens) // context))
    return tokens[: count * context].view(count, -1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens, in nats a token, of `[windows, context, vocabulary]` logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Return a model's mean cross-entropy over windows `[windows, context]`; it is left in evaluation mode."""
    model.eval()
    total = 0.0
    for batch in rows.split(WINDOWS):
        total += next_token_loss(model(input_ids=batch, use_cache=False).logits, batch).item() * len(batch)
    return total / len(rows)


@dataclass(slots=True)
class TrainingLog:
    """What happened."""

    held_out: list[tuple[int, float]]  # steps done, and the loss on held-out text
    losses: list[float] = field(default_factory=list)  # cross-entropy of each step's batch, in nats a token
    balance: list[float] = field(default_factory=list)  # load-balancing loss; perfect is the number of experts a token
    tokens: int = 0  # that were trained on, counting repeats
    seconds: float = 0.0  # that this took, without the evaluations


def train(
    model: nn.Module,
    tokens: Tensor,
    held_out: Tensor,
    settings: Settings,
    on_step: Callable[[TrainingLog, float], None],
) -> TrainingLog:
    """Train a causal language model of transformers on windows that begin anywhere in a stream of tokens.

    With AdamW, a warm-up and a cosine, clipped gradients, and a loss that keeps every expert in use. With the same
    seed, machine and number of threads, every loss is the same bit by bit, unless training goes by `seconds`.
    `on_step` is told the log so far and the share of training that is done.
    """
    parameters = list(model.parameters())
    # Gains of norms are not decayed, since a small gain is not a simpler model.
    decayed = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY}
    gains = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, gains], lr=settings.peak_learning_rate, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(settings.seed)
    rows = windows(held_out, settings.context, settings.held_out_windows)
    log = TrainingLog(held_out=[(0, mean_loss(model, rows))])
    done, evaluated = 0.0, 0
    model.train()
    while done < 1:
        start = time.perf_counter()
        cosine = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = settings.peak_learning_rate * min((len(log.losses) + 1) / WARM_UP_STEPS, cosine)
        begins = torch.randint(len(tokens) - settings.context, (settings.batch, 1), generator=generator)
        batch = tokens[begins + torch.arange(settings.context)]
        output: Any = model(input_ids=batch, output_router_logits=True, use_cache=False)
        loss = next_token_loss(output.logits, batch)
        balance = _balance(output.router_logits, settings)
        optimizer.zero_grad()
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        log.losses.append(loss.item())
        log.balance.append(balance.item())
        log.tokens += batch.numel()
        log.seconds += time.perf_counter() - start
        done = log.seconds / settings.seconds if settings.seconds else len(log.losses) / settings.steps
        if int(done * settings.evaluations) > evaluated or done >= 1:
            evaluated = int(done * settings.evaluations)
            log.held_out.append((len(log.losses), mean_loss(model, rows)))
            model.train()
        on_step(log, min(done, 1.0))
    return log


def _balance(router_logits: Sequence[Tensor], settings: Settings) -> Tensor:
    """Return the load-balancing loss of each layer, on average.

    Not the model's own `aux_loss`, which sees all layers as one: there a layer may send everything to one expert if
    another layer makes up for it.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    losses: list[Any] = [
        load_balancing_loss_func((logits,), settings.experts, settings.experts_per_token) for logits in router_logits
    ]
    return torch.stack(losses).mean()
