"""The command `kpt doctor`."""

import warnings
from typing import Annotated

import typer

from kpt_cli.console import print_json

BROKEN = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show devices, packages, which kernel serves what, and what is broken.

    Exit code: 0 all is well, 1 something is broken.
    """
    import kpt_core

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
