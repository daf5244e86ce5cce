"""The command `kpt demo`."""

import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.completion import one_of
from kpt_cli.console import print_json, say
from kpt_cli.errors import CliError
from kpt_cli.optimize.choices import LEVELS, OBJECTIVES, check_choice, check_max_error
from kpt_cli.optimize.output_directory import staged

from .output import check_output, is_demo
from .sizes import FULL, QUICK


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
    level: Annotated[
        str, typer.Option(help=f"What may change: {', '.join(LEVELS)}.", autocompletion=one_of(LEVELS))
    ] = "balanced",
    objective: Annotated[
        str, typer.Option(help=f"What to gain: {' or '.join(OBJECTIVES)}.", autocompletion=one_of(OBJECTIVES))
    ] = "latency",
    max_error: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a module's output; the level's own if left out."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and a few steps, to see that all works.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")] = False,
) -> None:
    """Train a small Mixture-of-Experts model on real text, optimise it, and report before and after.

    The text is the source code of Python's standard library, so nothing is downloaded. An earlier demo in the output
    folder is replaced.
    """
    check_choice("level", level, LEVELS)
    check_choice("objective", objective, OBJECTIVES)
    check_max_error(max_error)
    if steps is not None and seconds is not None:
        raise CliError(f"--steps {steps} and --seconds {seconds:g} contradict each other; give one of them")
    size = QUICK if quick else FULL
    real_output = check_output(output, size.disk_bytes)
    start = time.perf_counter()
    _spin_less()
    # After the checks, because it takes seconds.
    from .report import write_report
    from .run import Options, run_demo
    from .terminal import Screen, show_result

    options = Options(
        size=size,
        steps=None if seconds is not None else steps or size.steps,
        seconds=seconds,
        seed=seed,
        level=level,
        objective=objective,
        max_error=max_error,
    )
    with (
        redirect_stdout(sys.stderr),
        staged(real_output, replace=is_demo(real_output)) as staging,
    ):  # stdout is for the result
        screen = Screen()
        result = run_demo(options, staging, screen)
        with screen.phase("report", "Writing the report") as phase:
            write_report(result, staging)
            phase.outcome = str(output / "report.html")
    if as_json:
        print_json(result.as_dict())
        return
    show_result(result)
    say(f"\nDone in {time.perf_counter() - start:.0f} s. The report: {output / 'report.html'}", style="bold")


def _spin_less() -> None:
    """Let waiting OpenMP threads sleep after some microseconds, unless the user decides otherwise.

    By default they spin for milliseconds and, where another program runs beside this one, take the very cores that the
    threads they wait for need: training took four times as long. On an idle machine it makes no difference.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
