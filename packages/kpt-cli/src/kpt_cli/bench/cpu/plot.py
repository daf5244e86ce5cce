"""The figure: KPT's speed over the best peer's in each row, and where everybody else stands."""

from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from kpt_cli.demo.report import PAPER, Palette

from .contest import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def speed_figure(rows: Sequence[Row], title: str, palette: Palette = PAPER) -> "Figure":
    """A line for each row: speeds as ratios to the best peer's, on a logarithmic scale."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8.4, 1.1 + 0.26 * len(rows)))
    axes = figure.add_subplot()
    places = range(len(rows), 0, -1)
    for place, row in zip(places, rows, strict=True):
        best = row.best_peer
        gain = 1.0 if best is None else best.gain
        for result in row.results:
            colour = {"kpt": palette.after, "plain": palette.held_out}.get(result.role, palette.before)
            style = {"s": 34 if result.role == "kpt" else 16, "color": colour, "zorder": 3}
            axes.scatter(gain / result.gain, place, marker="D" if result.role == "dense" else "o", **style)
        axes.plot([1, gain], [place, place], color=palette.after, linewidth=1.4)
        axes.annotate(
            f"{gain:.2f}x", (gain, place), (6, 3), textcoords="offset points", fontsize=7.5, color=palette.ink
        )
    labels = [f"{row.title}, {row.contest.dtype}" for row in rows]
    axes.set_yticks(list(places), labels, fontsize=8, color=palette.ink)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=palette.muted, linewidth=0.8)
    axes.grid(axis="x", color=palette.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=palette.muted, length=0)
    axes.set_xlabel("speed, best peer = 1", color=palette.muted, fontsize=9)
    axes.set_title(title, loc="left", fontsize=9.5, color=palette.ink)
    marks = (("o", palette.after, "KPT"), ("o", palette.held_out, "KPT, plain"), ("o", palette.before, "peers"))
    for marker, colour, name in (*marks, ("D", palette.before, "dense")):
        axes.scatter([], [], marker=marker, s=16, color=colour, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.9 / len(rows) - 0.03), ncols=4, frameon=False, fontsize=8)
    return figure  # type: ignore[no-any-return]


def as_svg(figure: "Figure") -> str:
    """A figure as an SVG file that is the same for the same figures."""
    import matplotlib

    buffer = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kpt"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()
