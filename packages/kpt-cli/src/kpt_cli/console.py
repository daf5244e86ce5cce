"""Print tables and sentences for people, one JSON document for programs."""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from textwrap import TextWrapper
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDTH = 100  #: of tables where there is no terminal to fit; they are wider where a name needs it
_UNBOUNDED = 10_000  #: width of a console that is no terminal
_READABLE = 16  #: sentences in a column that is narrower are hard to read
_GAP = 3  #: between two columns


class _Console(Console):
    """Leaves a closed pipe to `main`, where rich would end the process, and long names whole."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but never cut a table off."""
        if any(isinstance(each, WordTable) for each in objects):
            options["crop"] = False
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        raise


def out(*, stderr: bool = False) -> Console:
    """Return the console for results, plain where stdout is no terminal or NO_COLOR is set."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _UNBOUNDED
    return _Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def err() -> Console:
    """Return the console for errors, warnings and progress."""
    return out(stderr=True)


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


def some(names: Iterable[str]) -> str:
    """Join a few names and count the rest."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def say_all(title: str, sentences: Iterable[str], style: str = "") -> None:
    """Print a section of sentences, each once; nothing if there is none."""
    if sentences := list(dict.fromkeys(sentences)):
        heading(title)
    for sentence in sentences:
        say(f"  {sentence}", style=style)


class WordTable(Table):
    """A table that breaks cells between words alone: names of kernels and modules can be copied.

    Where that doesn't fit, every row becomes a block of lines, one for each cell.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Decide on the widths first."""
        cells = [[str(cell) for cell in (column.header, *column.cells)] for column in self.columns]
        words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in cells]
        most = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
        least = [max(word, min(line, _READABLE)) for word, line in zip(words, most, strict=True)]
        room = min(options.max_width, WIDTH) if console.width == _UNBOUNDED else options.max_width
        spare = room - sum(least) - _GAP * (len(cells) - 1)
        if spare < 0 and console.width != _UNBOUNDED:
            yield from _blocks(cells, room)
            return
        # Those that want least more get it whole, and leave the rest to the others.
        for left, index in zip(
            range(len(cells), 0, -1), sorted(range(len(cells)), key=lambda i: most[i] - least[i]), strict=True
        ):
            more = min(most[index] - least[index], max(spare, 0) // left)
            spare -= more
            self.columns[index].width = least[index] + more
        yield from super().__rich_console__(console, options)


def _blocks(cells: list[list[str]], room: int) -> Iterator[Text]:
    """Rows of a table that is too wide, a line or some for each cell."""
    heads = [column[0] for column in cells]
    wide = max(map(len, heads)) + 2
    fit = TextWrapper(max(room - wide, 1), break_long_words=False, break_on_hyphens=False)
    for row in zip(*(column[1:] for column in cells), strict=True):
        lines = [
            f"{'' if number else head:<{wide}}{line}"
            for head, cell in zip(heads, row, strict=True)
            if cell
            for number, line in enumerate(part for line in cell.splitlines() for part in fit.wrap(line))
        ]
        yield Text("\n".join([*lines, ""]), no_wrap=True, overflow="ignore")


def table(*columns: str, right: tuple[str, ...] = ()) -> WordTable:
    """Make an empty table of these columns, of which `right` hold numbers."""
    made = WordTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in columns:
        made.add_column(title, overflow="fold", justify="right" if title in right else "left")
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
def progress(title: str = "") -> Iterator[Callable[..., None]]:
    """Show a bar on stderr while the block runs; gives the function that moves it.

    The function takes how much is done, of how much (None: nobody knows), and what is going on.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
    console = err()
    silent = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=silent) as bar:
        task = bar.add_task(title, total=None)

        def tell(done: float, total: float | None, what: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{title}  {what}".strip())

        yield tell
