"""How things are printed: tables and sentences for people, one JSON document for programs."""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

#: Width of tables where there is no terminal to fit.
WIDTH = 100


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def out() -> Console:
    """The console for results, plain where stdout is no terminal or NO_COLOR is set."""
    return _console(stderr=False)


def err() -> Console:
    """The console for errors, warnings and progress."""
    return _console(stderr=True)


def say(text: str, style: str = "") -> None:
    """Print a sentence to stdout, left whole where there is no terminal to fit."""
    console = out()
    console.print(text, style=style, soft_wrap=not console.is_terminal)


def complain(kind: str, text: str) -> None:
    """Print `kpt: <kind>: <text>` to stderr."""
    console = err()
    style = "bold red" if kind == "error" else "yellow"
    console.print(Text.assemble("kpt: ", (f"{kind}: ", style), text), soft_wrap=not console.is_terminal)


def heading(text: str) -> None:
    """Print a section's title."""
    out().print(f"\n{text}", style="bold")


def table(*columns: str, wide: str = "", right: tuple[str, ...] = ()) -> Table:
    """Make an empty table; its cells fold rather than lose text.

    Args:
        columns: titles.
        wide: title of the column that takes the room that is left.
        right: titles of the columns that hold numbers.
    """
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in columns:
        made.add_column(
            title,
            overflow="fold",
            ratio=1 if title == wide else None,
            justify="right" if title in right else "left",
        )
    return made


def print_json(document: Any) -> None:
    """Print one JSON document and nothing else; JSON has no infinities, they become null."""
    sys.stdout.write(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print KPT's warnings as sentences, without the line of code they came from; leave the others as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def showwarning(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            core = sys.modules.get("kpt_core")
            if core is not None and issubclass(category, core.KptWarning):
                complain("warning", str(message))
            else:
                show(message, category, *args, **kwargs)

        warnings.showwarning = showwarning
        yield


@contextmanager
def progress() -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar on stderr while the block runs, gone afterwards; gives the function that moves it.

    The function takes how much is done, of how much (None: nobody knows), and what is going on.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = err()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int | None, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell
