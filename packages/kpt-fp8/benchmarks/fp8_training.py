"""Train a small language model on real text in bfloat16 and with each FP8 recipe, and compare the losses.

    python packages/kpt-fp8/benchmarks/fp8_training.py
    python packages/kpt-fp8/benchmarks/fp8_training.py --small --recipe row

The text, its tokenizer, the width, the layers and the schedule are those of `kpt demo`. Its experts are no linear
layers, so the model is dense here, a Qwen3 of the same active size: then FP8 serves attention and MLP, all but
embedding and head. `--experts` takes the demo's own model instead, where FP8 serves attention alone. All runs have one
seed, one initial model and the same batches, under autocast to bfloat16. It exits with 1 unless each recipe ends within
1 % of bfloat16. `--small` is half as wide, with a smaller vocabulary and shorter windows: a minute or two for a run.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kpt_cli.bench.machine import machine
from kpt_cli.console import out, say, table
from kpt_cli.demo import FULL
from kpt_cli.demo import Settings as Size
from kpt_cli.demo.corpus import encode, read_corpus, train_tokenizer
from kpt_cli.demo.model import (
    BALANCE_WEIGHT,
    CLIP,
    FINAL_SHARE,
    INITIAL_DEVIATION,
    LONGEST,
    WARM_UP_STEPS,
    WEIGHT_DECAY,
    mean_loss,
    new_model,
    next_token_loss,
    quiet_transformers,
    windows,
)
from kpt_cli.output_file import check_output_file
from kpt_core.files import write_whole
from kpt_fp8.training import FP8TrainingEngine

#: What each recipe's loss may differ by.
LARGEST_GAP = 0.01
#: The recipe that quantises nothing.
PLAIN = "none"
#: Half as wide as the demo, for a processor that has other things to do.
SMALL = replace(
    FULL,
    name="small",
    corpus_bytes=2_000_000,
    vocabulary=512,
    hidden_size=128,
    expert_size=128,
    context=64,
    batch=4,
    quality_windows=128,
)
RECIPES = ("tensor", "delayed", "row", "block")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        losses: of each step, nats per token.
        held_out_loss: at the end.
        seconds: of training.
        skipped: steps.
        escalations: sentences.
        layers: the engine's last sentence on each layer.
    """

    losses: list[float]
    held_out_loss: float
    seconds: float
    skipped: int
    escalations: list[str]
    layers: list[str]

    @property
    def last(self) -> float:
        """The mean loss of the last twentieth of all steps."""
        some = self.losses[-max(len(self.losses) // 20, 1) :]
        return sum(some) / len(some)


def dense_model(size: Size, seed: int) -> Any:
    """A Qwen3 whose MLP is as wide as the experts that serve a token together."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.hidden_size // size.heads,
        intermediate_size=size.expert_size * size.experts_per_token,
        initializer_range=INITIAL_DEVIATION,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def train(recipe: str, size: Size, tokens: Tensor, held_out: Tensor, *, experts: bool, seed: int) -> Outcome:
    """Train a new model with one recipe."""
    model: Any = new_model(size, seed) if experts else dense_model(size, seed)
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=size.peak_learning_rate, betas=(0.9, 0.95))
    engine = FP8TrainingEngine(model, optimizer, recipe=recipe, clip_norm=CLIP)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(size.steps):
        cosine = FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * step / size.steps))
        for group in optimizer.param_groups:
            group["lr"] = size.peak_learning_rate * min((step + 1) / WARM_UP_STEPS, cosine)
        starts = torch.randint(len(tokens) - size.context, (size.batch, 1), generator=generator)
        batch = tokens[starts + torch.arange(size.context)]
        with torch.autocast("cpu", torch.bfloat16):
            output = engine(input_ids=batch, use_cache=False, **({"output_router_logits": True} if experts else {}))
        loss = next_token_loss(output.logits.float(), batch)
        losses.append(loss.item())
        engine.step(loss + BALANCE_WEIGHT * output.aux_loss if experts else loss)
    seconds = time.perf_counter() - start
    with torch.autocast("cpu", torch.bfloat16):
        final = mean_loss(model, windows(held_out, size.context, size.quality_windows))
    report = engine.report
    return Outcome(
        losses,
        final,
        seconds,
        report.skipped,
        [str(each) for each in report.escalations],
        [str(e) for e in report.layers],
    )


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 500,
    small: Annotated[bool, typer.Option(help="Half as wide, and less text.")] = False,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated; all of them without.")] = None,
    experts: Annotated[bool, typer.Option(help="The demo's own model, of which FP8 serves the attention.")] = False,
    seed: Annotated[int, typer.Option(help="Of models and batches.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A record as JSON.")] = None,
) -> None:
    """Train once in bfloat16 and once with each recipe."""
    check_output_file(output, "--output")
    quiet_transformers()
    size = replace(SMALL if small else FULL, steps=steps)
    corpus = read_corpus(limit=size.corpus_bytes)
    tokenizer = train_tokenizer(corpus.training, size.vocabulary, size.context)
    tokens, held_out = encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out)
    outcomes: dict[str, Outcome] = {}
    for name in (PLAIN, *(recipe or RECIPES)):
        outcomes[name] = train(name, size, tokens, held_out, experts=experts, seed=seed)
        say(f"{name}: {outcomes[name].seconds:.0f} s, held-out loss {outcomes[name].held_out_loss:.4f}")
    plain = outcomes[PLAIN]
    figures = ("last loss", "held-out loss", "beside bfloat16", "skipped", "escalated", "seconds")
    shown = table("recipe", *figures, right=figures)
    gaps = {}
    for name, found in outcomes.items():
        gaps[name] = found.held_out_loss / plain.held_out_loss - 1
        cells = [f"{found.last:.4f}", f"{found.held_out_loss:.4f}", f"{100 * gaps[name]:+.2f} %"]
        cells += [str(found.skipped), str(len(found.escalations)), f"{found.seconds:.0f}"]
        shown.add_row("bfloat16" if name == PLAIN else name, *cells)
    out().print(shown)
    met = all(abs(gap) <= LARGEST_GAP for gap in gaps.values())
    if output is not None:
        record = {
            "benchmark": "FP8 training beside bfloat16",
            "machine": machine(),
            "threads": torch.get_num_threads(),
            "size": asdict(size),
            "experts": experts,
            "seed": seed,
            "largest_gap": LARGEST_GAP,
            "met": met,
            "runs": {name: {**asdict(found), "gap": gaps[name]} for name, found in outcomes.items()},
        }
        write_whole(output, json.dumps(record, indent=1) + "\n")
    if not met:
        say(f"NOT MET: a recipe ends more than {100 * LARGEST_GAP:.0f} % from bfloat16", "bold red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
