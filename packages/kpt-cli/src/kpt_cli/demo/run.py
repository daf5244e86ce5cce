"""The demo from beginning to end: read, train, save, optimise, compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kpt_optimize import Optimized, optimize

from .corpus import Corpus, Source, read_corpus
from .generation import samples
from .kernels import kernels_used
from .memory import compare_memory
from .model import describe, load_model, new_model, quiet_transformers, save_model
from .quality import compare_quality, windows
from .result import Result, this_machine
from .sizes import Size
from .speed import compare_speed
from .terminal import Screen, sparkline
from .tokenizer import encode, train_tokenizer
from .training import TrainingLog, train

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL = "model"
PLAN = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user decides.

    Attributes:
        size: of the demo.
        steps: of training; None to go by `seconds`.
        seconds: of training.
        seed: of weights and training windows.
        level: of the optimisation.
        objective: of the optimisation.
        max_error: of the optimisation; None for the level's own.
    """

    size: Size
    steps: int | None
    seconds: float | None
    seed: int
    level: str
    objective: str
    max_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The corpus as tokens.

    Attributes:
        tokenizer: that made them.
        training: stream to learn from.
        held_out: stream to evaluate with.
        bytes_per_token: of the held-out stream.
    """

    tokenizer: "PreTrainedTokenizerFast"
    training: Tensor
    held_out: Tensor
    bytes_per_token: float


def run_demo(options: Options, folder: Path, screen: Screen) -> Result:
    """Run every phase and write model and plan into a folder.

    Args:
        options: what the user decided.
        folder: an empty one.
        screen: shows how it goes.
    """
    quiet_transformers()
    size = options.size
    corpus = _read(size, screen)
    text = _tokenize(corpus, size, screen)
    model_folder, plan_file = folder / MODEL, folder / PLAN
    about, log = _train(text, options, model_folder, screen)
    before: Any = load_model(model_folder)
    prompt = text.held_out[: size.prompt_tokens].unsqueeze(0)
    optimized = _optimize(before, prompt, options, screen)
    optimized.plan.save(plan_file)
    after: Any = optimized.model
    with screen.phase("speed", "Timing both models in turn") as phase:
        speed, over_plain = compare_speed(before, after, prompt, size.new_tokens, size.rounds, phase.tell)
        phase.outcome = ", ".join(f"{comparison.name} {comparison.verdict}" for comparison in speed)
    with screen.phase("memory", "Measuring peak memory") as phase:
        memory = compare_memory(model_folder, plan_file, size, phase.tell)
        phase.outcome = ", ".join(comparison.verdict for comparison in memory.comparisons)
    with screen.phase("quality", "Comparing on held-out files") as phase:
        rows = windows(text.held_out, size.context, size.quality_windows)
        compared = compare_quality(before, after, rows, text.bytes_per_token, phase.tell)
        used = kernels_used(after, prompt)
        phase.outcome = f"perplexity {compared.before.perplexity:.2f} before, {compared.after.perplexity:.2f} after"
    with screen.phase("samples", "Writing some code") as phase:
        written = samples(before, after, text.tokenizer, size.sample_tokens)
        phase.outcome = f"{sum(sample.identical for sample in written)} of {len(written)} texts identical"
    return Result(
        settings=_settings(options),
        machine=this_machine(),
        corpus=_describe_corpus(corpus, text),
        model=about,
        training=log,
        quality=compared,
        comparisons=(*speed, *memory.comparisons),
        over_plain=tuple(over_plain),
        libraries=memory.libraries,
        plan=optimized.plan,
        kernels=tuple(used),
        samples=tuple(written),
        durations=screen.durations,
    )


def _read(size: Size, screen: Screen) -> Corpus:
    with screen.phase("corpus", "Reading Python's standard library") as phase:
        corpus = read_corpus(limit=size.corpus_bytes)
        phase.outcome = (
            f"{len(corpus.training)} files, {_bytes_of(corpus.training) / 1e6:.1f} MB; "
            f"{len(corpus.held_out)} more held out"
        )
    return corpus


def _tokenize(corpus: Corpus, size: Size, screen: Screen) -> Text:
    with screen.phase("tokenizer", "Training a tokenizer") as phase:
        tokenizer = train_tokenizer(corpus.training, size.vocabulary, size.context)
        training, held_out = encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out)
        text = Text(
            tokenizer=tokenizer,
            training=training,
            held_out=held_out,
            bytes_per_token=_bytes_of(corpus.held_out) / len(held_out),
        )
        phase.outcome = (
            f"{size.vocabulary:,} entries, {len(training):,} tokens of {text.bytes_per_token:.1f} bytes on average"
        )
    return text


def _train(text: Text, options: Options, folder: Path, screen: Screen) -> tuple[dict[str, Any], TrainingLog]:
    """Train a model and save it; it is given back by its description only, to be loaded as a user would."""
    model = new_model(options.size, options.seed)
    about = describe(model, options.size)
    with screen.phase("training", f"Training {about['parameters'] / 1e6:.1f} M parameters") as phase:
        evaluations = 0

        def on_step(log: TrainingLog, done: float) -> None:
            nonlocal evaluations
            recent = sum(log.losses[-20:]) / len(log.losses[-20:])
            detail = f"{sparkline(log.losses)} loss {recent:.2f}, {log.tokens / log.seconds:,.0f} tokens/s"
            phase.tell(done, 1.0, detail)
            if len(log.held_out) > evaluations:
                evaluations = len(log.held_out)
                step, loss = log.held_out[-1]
                phase.note(f"step {step:4d}: loss {recent:.3f}, held-out {loss:.3f}")

        log = train(
            model,
            text.training,
            text.held_out,
            options.size,
            seed=options.seed,
            steps=options.steps,
            seconds=options.seconds,
            on_step=on_step,
        )
        phase.outcome = (
            f"{len(log.losses)} steps, held-out loss {log.held_out[0][1]:.2f} -> {log.held_out[-1][1]:.2f}, "
            f"{log.tokens / log.seconds:,.0f} tokens/s"
        )
    with screen.phase("saving", "Saving the model") as phase:
        save_model(model, text.tokenizer, folder)
        phase.outcome = "a Hugging Face folder with safetensors"
    return about, log


def _optimize(model: Any, prompt: Tensor, options: Options, screen: Screen) -> Optimized:
    with screen.phase("optimize", "Optimising the saved model") as phase, torch.no_grad():
        optimized = optimize(
            model,
            level=options.level,
            objective=options.objective,
            example_inputs={"input_ids": prompt, "use_cache": False},
            max_error=options.max_error,
            on_progress=phase.tell,
        )
        phase.outcome = f"{len(optimized.plan.kept)} of {len(optimized.plan.entries)} rewrites kept"
    return optimized


def _settings(options: Options) -> dict[str, Any]:
    return {
        "steps": options.steps,
        "seconds": options.seconds,
        "seed": options.seed,
        "level": options.level,
        "objective": options.objective,
        "max_error": options.max_error,
        "size": options.size.as_dict(),
    }


def _describe_corpus(corpus: Corpus, text: Text) -> dict[str, Any]:
    return {
        "source": "source code of Python's standard library",
        "training_files": len(corpus.training),
        "training_bytes": _bytes_of(corpus.training),
        "training_tokens": len(text.training),
        "held_out_files": [source.path for source in corpus.held_out],
        "held_out_bytes": _bytes_of(corpus.held_out),
        "held_out_tokens": len(text.held_out),
        "bytes_per_token": text.bytes_per_token,
    }


def _bytes_of(sources: Sequence[Source]) -> int:
    return sum(len(source.text.encode()) for source in sources)
