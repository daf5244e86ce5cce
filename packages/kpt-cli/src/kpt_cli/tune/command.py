"""The command `kpt tune`."""

from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.completion import DEVICE_TYPES, one_of, op_names
from kpt_cli.console import print_json, progress
from kpt_cli.dtypes import KNOWN, dtypes_named
from kpt_cli.errors import CliError
from kpt_cli.output_file import check_output_file


def tune(
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP]...", help="Ops to tune.", show_default="all", autocompletion=op_names),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="As torch spells it.",
            show_default="the first accelerator, or the CPU",
            autocompletion=one_of(DEVICE_TYPES),
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(KNOWN)}; may be repeated.",
            show_default="those of the cases",
            autocompletion=one_of(KNOWN),
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case; may be repeated.", show_default="those of real models")
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure each case.")] = 1.0,
    training: Annotated[bool, typer.Option("--training", help="Time forward and backward.")] = False,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Table to write.", show_default="the user's table of the device")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure which kernels and configurations are fastest on this machine, and use those from now on.

    What runs without tuning is among what is timed, and stays unless another one is surely faster. Only kernels whose
    result is the reference's, up to rounding, are timed.
    """
    if not seconds > 0:
        raise CliError(f"--seconds {seconds:g}: expected more than 0")
    check_output_file(output, "--out")
    dtypes = dtypes_named(dtype or [])
    from kpt_cli.optimize.choices import check_device
    from kpt_optimize.tuning.run import tune as measure

    from .report import document, show

    where = check_device(device)
    with progress() as tell:
        found = measure(
            ops or (),
            device=where,
            dtypes=dtypes,
            cases=case or (),
            seconds=seconds,
            training=training,
            path=output,
            dry_run=dry_run,
            on_progress=tell,
        )
    if as_json:
        print_json(document(found))
    else:
        show(found, own_file=output is not None)
