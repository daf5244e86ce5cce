"""The command `kpt demo`. Nothing heavy is imported here."""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.console import print_json, say
from kpt_cli.errors import CliError
from kpt_cli.options import Level, MaxError, Objective
from kpt_cli.output_file import check_new_folder, staged

from .settings import FULL, KIND, QUICK, REPORT, Settings

__all__ = ["FULL", "KIND", "QUICK", "REPORT", "Settings", "demo"]


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
    """Train a small Mixture-of-Experts model on real text, and report what each feature and `optimize` gain on it.

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
        result = run.run_demo(settings, staging, screen) | {"next": run.next_step(output)}
        with screen.phase("report", "Writing the report"):
            document = write_report(result, staging)
            screen.outcome = str(output / PAGE)
    if as_json:
        print_json(document)
        return
    run.show_result(result)
    run.show_next(result["next"])
    say(f"\nDone in {time.perf_counter() - start:.0f} s. The report: {output / PAGE}", style="bold")


def check_output(output: Path, disk_bytes: int) -> Path:
    """Return the real path of a folder that is new, empty or of an earlier demo; else, or without room, `CliError`."""
    otherwise = "" if is_demo(output) else "is not empty and holds no earlier demo; choose another folder"
    return check_new_folder(output, f"--output {output}", otherwise, disk_bytes)


def is_demo(folder: Path) -> bool:
    """Tell if a folder was written by an earlier demo."""
    try:
        document = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


def _spin_less() -> None:
    """Let waiting OpenMP threads sleep after some microseconds, unless the user decides otherwise.

    Else they spin for milliseconds on cores that what they wait for needs: training took four times as long.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
