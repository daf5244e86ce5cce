"""The demo from beginning to end, read, train, save, optimise, compare, and what it shows on the terminal."""

import os
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from kpt_cli.bench.machine import machine
from kpt_cli.console import err, heading, out, progress, say, table
from kpt_cli.optimize.command import plan_table
from kpt_optimize import optimize

from . import measure
from .corpus import bytes_of, encode, read_corpus, train_tokenizer
from .features import described, load_features, pairs
from .measure import NOISE, Figures
from .model import TrainingLog, describe, load_model, new_model, quiet_transformers, save_model, train, windows
from .settings import Settings


class Screen:
    """Shows one phase after the other on stderr, each with its `outcome`, and keeps their durations."""

    def __init__(self) -> None:
        self.durations: dict[str, float] = {}
        self.outcome, self.interrupted = "", False
        self.console = err()

    def _interrupt(self, number: int, frame: Any) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Show a bar, which `tell` moves, while the block runs, and a line with its outcome afterwards."""
        start = time.perf_counter()
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with progress(title) as self.tell:
                yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.interrupted:  # in compiled code, which swallowed the exception
            raise KeyboardInterrupt
        seconds = self.durations[name] = time.perf_counter() - start
        line = Text.assemble(("  ✓ ", "green"), f"{title:<32}", (f"{seconds:6.1f} s  ", "dim"), self.outcome)
        self.console.print(line, soft_wrap=True)


def run_demo(settings: Settings, folder: Path, screen: Screen) -> Figures:
    """Run every phase and write model and plan into an empty folder; return the report, its plan as an object."""
    quiet_transformers()
    result: Figures = {"settings": asdict(settings), "machine": machine(), "durations": screen.durations}
    result["first"] = _first_gain(settings, screen)
    with screen.phase("corpus", "Reading Python's standard library"):
        corpus = read_corpus(limit=settings.corpus_bytes)
        read = {"training_bytes": bytes_of(corpus.training), "held_out_bytes": bytes_of(corpus.held_out)}
        files = [source.path for source in corpus.held_out]
        result["corpus"] = read | {"training_files": len(corpus.training), "held_out_files": files}
        megabytes = read["training_bytes"] / 1e6
        screen.outcome = f"{len(corpus.training)} files, {megabytes:.1f} MB; {len(corpus.held_out)} more held out"
    with screen.phase("tokenizer", "Training a tokenizer"):
        tokenizer = train_tokenizer(corpus.training, settings.vocabulary, settings.context)
        training, held_out = encode(tokenizer, corpus.training), encode(tokenizer, corpus.held_out)
        each = read["held_out_bytes"] / len(held_out)
        counts = {"training_tokens": len(training), "held_out_tokens": len(held_out)}
        result["corpus"] |= counts | {"bytes_per_token": each}
        screen.outcome = f"{settings.vocabulary:,} entries, {len(training):,} tokens of {each:.1f} bytes on average"
    model, log = _train(settings, training, held_out, screen)
    result |= {"model": describe(model, settings), "training": asdict(log)}
    with screen.phase("saving", "Saving the model"):
        save_model(model, tokenizer, folder / "model")
        screen.outcome = "a Hugging Face folder with safetensors"
    # From here on it is what its user would load.
    before = load_model(folder / "model")
    prompt = held_out[: settings.prompt_tokens].unsqueeze(0)
    with screen.phase("optimize", "Optimising the saved model"), torch.no_grad():
        optimized = optimize(
            before,
            level=settings.level,
            objective=settings.objective,
            example_inputs={"input_ids": prompt, "use_cache": False},
            max_error=settings.max_error,
            on_progress=screen.tell,
        )
        plan, after = optimized.plan, optimized.model
        plan.save(folder / "plan.json")
        result["plan"] = plan
        screen.outcome = f"{len(plan.kept)} of {len(plan.entries)} rewrites kept"
    with screen.phase("speed", "Timing all models in turn"):
        alone, result["missing"] = load_features(folder / "model")
        models = {"before": before, "plain": after, "after": after} | alone
        compared = [*pairs(models), ("before", "after"), ("plain", "after")]
        *of_features, speed, over_plain = measure.compare_speed(models, compared, prompt, settings, screen.tell)
        result["over_plain"] = over_plain
        screen.outcome = _told(speed)
    with screen.phase("memory", "Measuring peak memory"):
        memory, libraries = measure.compare_memory(folder / "model", folder / "plan.json", settings, screen.tell)
        result["comparisons"] = [*speed, *memory]
        result["headline"] = f"{_told(speed)} with KPT's plan"
        result["memory"] = {"measured_as": measure.MEMORY_MEASURE, "libraries_bytes": libraries}
        screen.outcome = ", ".join(comparison["verdict"] for comparison in memory)
    with screen.phase("quality", "Comparing on held-out files"):
        rows = windows(held_out, settings.context, settings.quality_windows)
        result["quality"] = quality = measure.compare_quality(before, after, rows, each, screen.tell)
        result["features"] = described(models, of_features, rows)
        # The budget holds for the inputs that the plan was made with.
        quality["beyond_budget"] = quality["difference"]["relative"] > plan.max_error
        result["kernels"] = measure.kernels_used(after, prompt)
        old, new = quality["before"]["perplexity"], quality["after"]["perplexity"]
        screen.outcome = f"perplexity {old:.2f} before, {new:.2f} after"
    with screen.phase("samples", "Writing some code"):
        result["samples"] = written = measure.samples(before, after, tokenizer, settings.sample_tokens)
        screen.outcome = f"{sum(sample['identical'] for sample in written)} of {len(written)} texts identical"
    return result


def _first_gain(settings: Settings, screen: Screen) -> list[Figures]:
    """Time the model before it has learnt anything, with transformers' experts and KPT's: speed needs no training."""
    with screen.phase("first gain", "Timing the untrained model"), torch.no_grad():
        models: dict[str, Any] = {
            "before": new_model(settings, settings.seed),
            "kpt": new_model(settings, settings.seed, experts_implementation="kpt"),
        }
        for model in models.values():
            model.eval()
        generator = torch.Generator().manual_seed(settings.seed)
        prompt = torch.randint(1, settings.vocabulary, (1, settings.prompt_tokens), generator=generator)
        (found,) = measure.compare_speed(models, [("before", "kpt")], prompt, settings, screen.tell)
        screen.outcome = f"{_told(found)} with KPT's experts"
    return found


def _told(comparisons: Sequence[Figures]) -> str:
    return ", ".join(f"{comparison['name']} {comparison['verdict']}" for comparison in comparisons)


def _train(settings: Settings, training: Tensor, held_out: Tensor, screen: Screen) -> tuple[Any, TrainingLog]:
    def on_step(log: TrainingLog, done: float) -> None:
        recent = statistics.mean(log.losses[-20:])
        screen.tell(done, 1.0, f"loss {recent:.2f}, {log.tokens / log.seconds:,.0f} tokens/s")
        step, loss = log.held_out[-1]
        if step == len(log.losses):  # it was measured after this very step
            screen.console.print(f"    step {step:4d}: loss {recent:.3f}, held-out {loss:.3f}", style="dim")

    model = new_model(settings, settings.seed, experts_implementation="kpt")
    with screen.phase("training", f"Training {model.num_parameters() / 1e6:.1f} M parameters"):
        log = train(model, training, held_out, settings, on_step)
        screen.outcome = (
            f"{len(log.losses)} steps, held-out loss {log.held_out[0][1]:.2f} -> {log.held_out[-1][1]:.2f}, "
            f"{log.tokens / log.seconds:,.0f} tokens/s"
        )
    return model, log


def show_result(result: Figures) -> None:
    """Print the tables."""
    plan, quality, difference = result["plan"], result["quality"], result["quality"]["difference"]
    before, after = quality["before"]["perplexity"], quality["after"]["perplexity"]
    small, large = plan.bytes_after / 2**20, plan.bytes_before / 2**20
    heading(result["headline"])
    heading("Each feature by itself")
    made = table("", "prefill", "decode", "weights, MiB", "perplexity")
    for each in result["features"]:
        speed = (Text(f"{c['verdict']}, {c['interval']}", _style(c)) for c in each["comparisons"])
        sizes, reads = each["bytes"], each["perplexity"]
        held = f"{sizes['before'] / 2**20:.1f} -> {sizes['after'] / 2**20:.1f}"
        read = f"{reads['before']:.2f} -> {reads['after']:.2f}"
        made.add_row(f"{each['name']}: {each['what']}", *speed, held, read)
    out().print(made)
    for sentence in result["missing"]:
        say(sentence)
    heading("Before and after the plan")
    _show_comparisons(
        ("before", "after"),
        result["comparisons"],
        ("weights, MiB", f"{large:.1f}", f"{small:.1f}", f"{large / small:.2f}x"),
        ("perplexity, held-out", f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.3%}"),
    )
    say(
        f"Largest logit difference {difference['largest']:.2e} ({difference['relative']:.1e} of the largest logit); "
        f"the same likeliest token at {difference['same_choice']:.2%} of the positions. "
        "Brackets: first to third quartile; of a speed after, the interval of its ratio to the one before."
    )
    if quality["beyond_budget"]:
        say(
            f"That is beyond the error budget of {plan.max_error:.0e}, which holds for the inputs that the plan was "
            "made with: where two experts are almost equally likely, the least change sends a token to the other one."
        )
    heading(f"Plan: {len(plan.kept)} of {len(plan.entries)} rewrites kept ({plan.level}, {plan.objective})")
    out().print(plan_table(plan))
    heading("Which kernel ran where")
    if result["kernels"]:
        made = table("module", "op", "kernel", "why")
        for use in result["kernels"]:
            made.add_row(", ".join(use["modules"]), "  " * use["level"] + use["op"], use["kernel"], use["why"])
        out().print(made)
    else:
        say("No op of KPT ran: nothing was kept, so transformers' own code serves the experts.")
    heading("The optimised model without a vendor's kernels, and with them")
    _show_comparisons(("plain PyTorch", "kernels"), result["over_plain"])
    same = sum(sample["identical"] for sample in result["samples"])
    heading(f"What the model writes: {same} of {len(result['samples'])} texts are identical before and after")
    for sample in result["samples"]:
        out().print(Text.assemble("\n", (sample["prompt"], "bold"), sample["before"]), soft_wrap=True)
        say("# after: identical" if sample["identical"] else "# after:", style="dim")
        if not sample["identical"]:
            out().print(Text.assemble((sample["prompt"], "bold"), sample["after"]), soft_wrap=True)


def next_step(output: Path) -> Figures:
    """Return the command that does the same for a model of the user's, and the program that uses its plan."""
    program = Path(sys.executable).with_name("kpt")
    kpt = "kpt" if shutil.which("kpt") or not program.exists() else os.path.relpath(program)
    model, plan = output / "model", "my-plan.json"
    return {
        "model": str(model),
        "command": f"{kpt} optimize {shlex.quote(str(model))} -o {plan}",
        "program": (
            "import kpt_optimize\n"
            "from transformers import AutoModelForCausalLM\n\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(model)!r})\n"
            f"kpt_optimize.apply_plan(model, {plan!r}, inplace=True)\n"
        ),
    }


def show_next(step: Figures) -> None:
    """Print the last step: the same for a model of the user's."""
    heading("Now your model")
    say(f"The same on your own model, whose folder takes the place of {step['model']}; it is not changed:\n")
    out().print(f"    {step['command']}\n", markup=False, highlight=False, soft_wrap=True)
    say("Then, in your program:\n")
    indented = "".join(f"    {line}".rstrip() + "\n" for line in step["program"].splitlines())
    out().print(indented, markup=False, highlight=False, soft_wrap=True)


def _style(comparison: Figures) -> str:
    return "dim" if comparison["verdict"] == NOISE else "bold green" if comparison["good"] else "bold red"


def _show_comparisons(names: tuple[str, str], comparisons: Sequence[Figures], *more: tuple[str, ...]) -> None:
    made = table("", *names, "verdict", right=names)
    for each in comparisons:
        cells = (f"{s['value']:,.0f} [{s['low']:,.0f} to {s['high']:,.0f}]" for s in (each["before"], each["after"]))
        verdict = Text(f"{each['verdict']}, {each['interval']}", _style(each))
        made.add_row(f"{each['name']}, {each['unit']}", *cells, verdict)
    for row in more:
        made.add_row(*row)
    out().print(made)
