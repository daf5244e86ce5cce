"""What reports have in common: a table for the terminal, JSON, and a plot."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kpt_core import InputError
from kpt_core.files import write_whole

from .quality import Quality

if TYPE_CHECKING:
    from rich.table import Table

#: Layers of a plot; more could not be read.
_PLOTTED = 40
#: What matplotlib writes without another library.
_FORMATS = (".svg", ".png", ".pdf")


class Report(ABC):
    """A dataclass with `layers`, worst first. `print` gives text; rich prints a table."""

    title: ClassVar[str]
    layers: tuple[Any, ...]

    @abstractmethod
    def head(self) -> tuple[str, ...]:
        """Name the columns."""

    @abstractmethod
    def cells(self, layer: Any) -> tuple[str, ...]:
        """Return the table's row of a layer."""

    @abstractmethod
    def plotted(self, layer: Any) -> Quality:
        """Return what is plotted of a layer."""

    def as_dict(self) -> dict[str, Any]:
        """Return a document for JSON."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # subclasses are dataclasses

    def __str__(self) -> str:
        from kpt_optimize import table

        return "\n".join([self.title, *table(self.head(), *map(self.cells, self.layers))])

    def __rich__(self) -> "Table":
        from rich import box
        from rich.table import Table

        made = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, name in enumerate(self.head()):
            made.add_column(name, justify="right" if number > 1 else "left", overflow="fold")
        for layer in self.layers:
            made.add_row(*self.cells(layer))
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        write_whole(path, json.dumps(finite(self.as_dict()), indent=2, allow_nan=False) + "\n")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each layer's SQNR and that of its worst row; the file appears whole or not at all.

        Raises:
            InputError: the path does not end in .svg, .png or .pdf, or matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix not in _FORMATS:
            raise InputError(f"plot: path must end in {', '.join(_FORMATS)}; got {str(path)!r}: choose one of them")
        try:
            import matplotlib
        except ImportError as error:
            raise InputError("plot: matplotlib is not installed: pip install './packages/kpt-fp8[report]'") from error
        temporary = path.with_name(f".{path.stem}.{os.urandom(4).hex()}{path.suffix}")
        try:
            with matplotlib.rc_context({"svg.fonttype": "none"}):
                _draw(
                    self.title,
                    [(f"{each.name} ({each.granularity})", self.plotted(each)) for each in self.layers],
                    temporary,
                )
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(title: str, marks: Sequence[tuple[str, Quality]], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: it has global state, and looks for a window system

    shown = [mark for mark in marks if math.isfinite(mark[1].sqnr) and math.isfinite(mark[1].worst_row_sqnr)][:_PLOTTED]
    figure = Figure(figsize=(8, 1.2 + 0.2 * max(len(shown), 3)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    worst, whole = [each.worst_row_sqnr for _, each in shown], [each.sqnr for _, each in shown]
    axes.hlines(places, worst, whole, color="#c5ccd6", linewidth=1.5, zorder=1)
    axes.scatter(worst, places, color="#d4622a", s=18, label="worst row", zorder=2)
    axes.scatter(whole, places, color="#2f6fdf", s=18, label="all rows", zorder=2)
    axes.set_yticks(places, [label for label, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("SQNR in dB; more is better")
    axes.grid(axis="x", color="#dde2e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    more = f" ({len(shown)} of {len(marks)})" if len(shown) < len(marks) else ""
    axes.set_title(title + more, fontsize=10, loc="left")
    figure.savefig(path)
