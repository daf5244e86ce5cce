"""The command `kpt demo`, and how large it is. Nothing heavy is imported here."""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.console import print_json, say
from kpt_cli.errors import CliError
from kpt_cli.options import Level, MaxError, Objective
from kpt_cli.output_file import check_folder, staged

REPORT = "report.json"
KIND = "kpt demo"  #: what report.json says it is, by which an earlier demo is recognised


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user decides, and what the size of the demo does; as it stands, a minute of training on two cores."""

    seed: int = 0  # of weights and training windows
    seconds: float | None = None  # of training; `steps` decide if it is None
    steps: int = 480  # of training
    level: str = "balanced"  # of the optimisation
    objective: str = "latency"  # of the optimisation
    max_error: float | None = None  # of the optimisation; None for the level's own
    name: str = "full"  # of the size
    corpus_bytes: int | None = None  # source code to read, None for all of it
    vocabulary: int = 2048  # entries of the tokenizer
    hidden_size: int = 256
    layers: int = 2  # each with experts
    heads: int = 4  # of attention
    key_value_heads: int = 2  # of attention, shared by the heads
    experts: int = 8  # of every layer
    experts_per_token: int = 2
    expert_size: int = 256  # inner size of an expert
    context: int = 128  # tokens of a training window
    batch: int = 8  # windows of a training step
    peak_learning_rate: float = 3e-3  # at the end of the warm-up
    evaluations: int = 10  # how often the held-out loss is measured during training
    held_out_windows: int = 32  # that this takes
    quality_windows: int = 192  # that perplexity and the use of experts are measured on at the end
    prompt_tokens: int = 512  # of the prompt that is timed
    new_tokens: int = 32  # that are generated and timed after it
    rounds: int = 15  # of timing, each with both models; more where the machine is busy
    memory_runs: int = 3  # processes for each phase and model
    sample_tokens: int = 64  # of each text that is shown
    disk_bytes: int = 32 * 2**20  # that the output needs


FULL = Settings()
#: Seconds, to see that everything works.
QUICK = Settings(
    name="quick",
    corpus_bytes=300_000,
    vocabulary=512,
    hidden_size=32,
    heads=2,
    key_value_heads=1,
    expert_size=32,
    context=64,
    batch=4,
    steps=12,
    peak_learning_rate=5e-3,
    evaluations=3,
    held_out_windows=8,
    quality_windows=8,
    prompt_tokens=64,
    new_tokens=8,
    rounds=9,
    memory_runs=1,
    sample_tokens=12,
    disk_bytes=8 * 2**20,
)


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the model, its plan and the report.")
    ] = Path("kpt-demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Training steps; {FULL.steps} if left out.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Train this long instead; the result then depends on the machine's speed."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the weights and what is trained on when.")] = 0,
    level: Level = "balanced",
    objective: Objective = "latency",
    max_error: MaxError = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and a few steps, to see that all works.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Train a small Mixture-of-Experts model on real text, optimise it, and report before and after.

    The text is the source code of Python's standard library, so nothing is downloaded. An earlier demo in the output
    folder is replaced.
    """
    if steps is not None and seconds is not None:
        raise CliError(f"--steps {steps} and --seconds {seconds:g} contradict each other; give one of them")
    settings = replace(QUICK if quick else FULL, seconds=seconds, seed=seed, level=level, objective=objective)
    settings = replace(settings, max_error=max_error, steps=steps or settings.steps)
    real_output = check_output(output, settings.disk_bytes)
    start = time.perf_counter()
    _spin_less()
    # After the checks, because it takes seconds.
    from . import run
    from .report import PAGE, write_report

    screen = run.Screen()
    # stdout is for the result
    with redirect_stdout(sys.stderr), staged(real_output, replace=is_demo(real_output)) as staging:
        result = run.run_demo(settings, staging, screen)
        with screen.phase("report", "Writing the report"):
            document = write_report(result, staging)
            screen.outcome = str(output / PAGE)
    if as_json:
        print_json(document)
        return
    run.show_result(result)
    say(f"\nDone in {time.perf_counter() - start:.0f} s. The report: {output / PAGE}", style="bold")


def check_output(output: Path, disk_bytes: int) -> Path:
    """Return the real path of a folder that is new, empty or of an earlier demo; else, or without room, `CliError`."""
    real = output.resolve()
    if real.exists() and not real.is_dir():
        raise CliError(f"--output {output} is a file; expected a folder that is new, empty or of an earlier demo")
    if real.is_dir() and any(real.iterdir()) and not is_demo(real):
        raise CliError(f"--output {output} is not empty and holds no earlier demo; choose another folder")
    check_folder(real.parent, f"--output {output}", disk_bytes)
    return real


def is_demo(folder: Path) -> bool:
    """Tell if a folder was written by an earlier demo."""
    try:
        document = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


def _spin_less() -> None:
    """Let waiting OpenMP threads sleep after some microseconds, unless the user decides otherwise.

    By default they spin for milliseconds and, where another program runs beside this one, take the very cores that the
    threads they wait for need: training took four times as long. On an idle machine it makes no difference.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
