"""The command `kpt tune`."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import heading, out, print_json, progress, say, say_all, table
from .errors import CliError
from .offers import function_of, with_config
from .options import Device, Dtypes, Json, check_device, dtypes_named, op_names
from .output_file import check_output_file

if TYPE_CHECKING:
    from kpt_optimize.tuning import TuningEntry
    from kpt_optimize.tuning.run import Tuning


def tune(
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP]...", help="Ops to tune.", show_default="all", autocompletion=op_names),
    ] = None,
    device: Device = None,
    dtype: Dtypes = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case; may be repeated.", show_default="those of real models")
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure each case.")] = 1.0,
    training: Annotated[bool, typer.Option("--training", help="Time forward and backward.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Table to write.", show_default="the user's table of the device"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure which kernels and configurations are fastest on this machine, and use those from now on.

    What runs without tuning is among what is timed, and stays unless another one is surely faster. Only kernels whose
    result is the reference's, up to rounding, are timed.
    """
    if not seconds > 0:
        raise CliError(f"--seconds {seconds:g}: expected more than 0")
    check_output_file(output, "--output")
    from kpt_optimize.tuning.run import tune as measure

    with progress() as tell:
        found = measure(
            ops or (),
            device=check_device(device),
            dtypes=dtypes_named(dtype),
            cases=case or (),
            seconds=seconds,
            training=training,
            path=output,
            dry_run=dry_run,
            on_progress=tell,
        )
    if as_json:
        path, aside = (None if file is None else str(file) for file in (found.path, found.aside))
        results, entries = [result.as_dict() for result in found.results], [asdict(entry) for entry in found.entries]
        document = {"device": found.device, "path": path, "aside": aside, "results": results, "entries": entries}
        print_json(document | {"skipped": found.skipped})
    else:
        _show(found, own_file=output is not None)


def _show(found: "Tuning", *, own_file: bool) -> None:
    """Print the results, what was left out and why, and where they were written."""
    heading(f"Tuned for {found.device}")
    kept = {entry.calls: entry for entry in found.entries}
    made = table("op", "case", "dtype", "default", "winner", "gain", right=("gain",))
    for result in found.results:
        if result.entry is not None:
            winner = _outcome(result.entry, kept[result.entry.calls])
            made.add_row(result.op, result.case, result.dtype, function_of(result.entry.default), *winner)
    if made.row_count:
        out().print(made)
    left_out = [
        f"{result.op}, {result.dtype}{f', {result.case}' if refused.of_call else ''}: "
        f"{refused.kernel}: {refused.reason}"
        for result in found.results
        for refused in result.left_out
        # A kernel for another kind of device needs no explanation; `kpt doctor` names backends that are missing.
        if refused.kernel is not None and not refused.reason.startswith("runs on ")
    ]
    say_all("Left out", left_out)
    untuned: dict[tuple[str, str], list[str]] = {}
    for result in found.results:
        if result.entry is None:
            untuned.setdefault((result.op, result.case), []).append(result.dtype)
    reasons = [f"{op}: {reason}" for op, reason in found.skipped.items()]
    reasons += [f"{op}, {', '.join(dtypes)}: only the reference takes {case}" for (op, case), dtypes in untuned.items()]
    say_all("Nothing to tune", reasons)
    out().print()
    if not found.results:
        say("Nothing was measured, and nothing was written.")
    elif not found.entries:
        wrong = any(refused.of_call for result in found.results for refused in result.left_out)
        does = "computes the cases rightly" if wrong else "takes the cases"
        say(f"Nothing is to be tuned: no kernel but the reference {does}. Nothing was written.")
    elif found.path is None:
        say("Nothing was written (--dry-run).")
    else:
        say(f"Wrote {found.path}.{'' if own_file else ' It takes effect with the next call.'}")
    if found.aside is not None:
        say(f"The old table could not be used as it was; it is kept as {found.aside}.", style="yellow")
    if found.path is not None and os.environ.get("KPT_TUNING", "").lower() in ("0", "false"):
        say("Tuned choices are switched off by KPT_TUNING.", style="yellow")


def _outcome(entry: "TuningEntry", kept: "TuningEntry") -> tuple[str, str]:
    """Return the winner and its gain, for a row of the table."""
    from kpt_optimize.measure import describe_gain, noise_share

    if (entry.kernel, entry.config) == (entry.default, None):
        return "the default stays", "-"
    winner = with_config(function_of(entry.kernel), entry.config)
    if (entry.kernel, entry.config) != (kept.kernel, kept.config):
        winner += "\nbut another case of this key differs: the default stays"
    return winner, describe_gain(entry.gain, noise_share(entry.gain, entry.noise))
