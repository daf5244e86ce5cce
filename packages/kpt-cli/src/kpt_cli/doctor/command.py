"""The command `kpt doctor`."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.console import out, print_json, say

BROKEN = 1


def doctor(
    lock: Annotated[
        Path | None, typer.Option(help="Only compare with this lock file of `kpt lock`.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show devices, packages, which kernel serves what, and what is broken.

    Exit code: 0 all is well, 1 something is broken or differs from the lock file.
    """
    import kpt_core

    if lock is not None:
        _compare(lock, as_json)
        return
    from .report import examine
    from .text import show

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kpt_core.PluginWarning)  # every one is among the report's problems
        report = examine()
    if as_json:
        print_json(report.as_dict())
    else:
        show(report)
    if report.problems:
        raise typer.Exit(BROKEN)


def _compare(path: Path, as_json: bool) -> None:
    from kpt_optimize.lock import read_lock

    lock = read_lock(path)
    differences = lock.differences()
    if as_json:
        print_json({"ok": not differences, "lock": str(path), "differences": differences})
    else:
        for sentence in differences:
            say(sentence, style="red")
        count = len(differences)
        verdict = f"{count} difference{'' if count == 1 else 's'} from {path}." if count else f"All is as in {path}."
        out().print(verdict, style="bold red" if differences else "bold green", soft_wrap=True)
    if differences:
        raise typer.Exit(BROKEN)
