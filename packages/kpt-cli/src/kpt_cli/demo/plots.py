"""The figures of the report, drawn with matplotlib in colours that the page decides."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from .comparison import NOISE, Comparison
from .training import TrainingLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by what they are for."""

    ink: str
    muted: str
    grid: str
    before: str
    after: str
    held_out: str


#: Inches of a figure on a page of full width, and on a telephone's.
WIDE, NARROW = 7.6, 3.5

#: For files that stand alone.
PAPER = Palette("#1c2430", "#667080", "#dde2e8", "#9aa4b2", "#2f6fdf", "#d4622a")
#: Stand-ins that `inline` replaces by CSS variables, so that figures follow the page into dark mode.
CSS = Palette("#010101", "#020202", "#030303", "#040404", "#050505", "#060606")
_VARIABLES = {
    CSS.ink: "var(--ink)",
    CSS.muted: "var(--muted)",
    CSS.grid: "var(--grid)",
    CSS.before: "var(--before)",
    CSS.after: "var(--after)",
    CSS.held_out: "var(--held-out)",
}


def loss_figure(log: TrainingLog, vocabulary: int, palette: Palette, width: float = WIDE) -> "Figure":
    """Loss over training: each batch, their running mean, and held-out text."""
    figure, axes = _figure(width, 3.3, palette)
    steps = range(1, len(log.losses) + 1)
    axes.plot(steps, log.losses, color=palette.after, alpha=0.25, linewidth=0.8)
    smooth = _smooth(log.losses, window=max(3, len(log.losses) // 25))
    axes.plot(steps, smooth, color=palette.after, linewidth=1.8)
    held_steps, held = zip(*log.held_out, strict=True)
    axes.plot(held_steps, held, color=palette.held_out, linewidth=1.2, marker="o", markersize=4, clip_on=False)
    guess = math.log(vocabulary)
    axes.axhline(guess, color=palette.muted, linewidth=0.8, linestyle=(0, (2, 3)))
    last = len(log.losses)
    note = f"guessing among {vocabulary:,} tokens: {guess:.2f}" if width == WIDE else f"guessing: {guess:.2f}"
    axes.annotate(
        note, (last, guess), (0, 4), textcoords="offset points", ha="right", color=palette.muted, fontsize=8.5
    )
    # Labels at the ends of the lines instead of a legend, kept apart where the lines meet.
    ends = sorted(((held[-1], "held-out", palette.held_out), (smooth[-1], "training", palette.after)), reverse=True)
    for (value, name, colour), shift in zip(ends, (5, -5), strict=True):
        axes.annotate(
            f"{name} {value:.2f}",
            (last, value),
            (8, shift),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_xlabel("training step", color=palette.muted)
    axes.set_ylabel("cross-entropy, nats per token", color=palette.muted)
    axes.set_xlim(0, last)
    axes.set_ylim(top=guess + 0.08 * (guess - min(log.losses)) + 0.05)
    figure.subplots_adjust(left=0.6 / width, right=1 - 1.1 / width, top=0.97, bottom=0.15)
    return figure


def comparison_figure(comparison: Comparison, libraries: int, palette: Palette) -> "Figure":
    """Before and after, side by side, with the first and third quartile as whiskers.

    Args:
        comparison: what is shown.
        libraries: bytes that are part of every peak of memory, drawn pale.
        palette: colours.
    """
    figure, axes = _figure(1.6, 2.7, palette)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    pale = libraries / 2**20 if comparison.name.startswith("peak memory") else 0.0
    for place, (spread, colour) in enumerate(((comparison.before, palette.before), (comparison.after, palette.after))):
        axes.bar(place, pale, width=0.62, color=colour, alpha=0.4)
        axes.bar(place, spread.median - pale, bottom=pale, width=0.62, color=colour)
        whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.errorbar(place, spread.median, whiskers, color=palette.ink, linewidth=1, capsize=3)
        axes.annotate(
            f"{spread.median:,.0f}",
            (place, max(spread.high, spread.median)),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=palette.ink,
            fontsize=9,
        )
    axes.set_xticks([0, 1], ["before", "after"], color=palette.ink)
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(0, max(comparison.before.high, comparison.after.high) * 1.16)
    name = comparison.name.replace("memory of a", "memory of\na").replace(", ", ",\n")
    axes.set_title(f"{name}\n{comparison.unit}", fontsize=9, color=palette.ink, pad=6)
    colour = palette.muted if comparison.verdict == NOISE or comparison.gain < 1 else palette.after
    axes.set_xlabel(f"{comparison.verdict}\n{comparison.interval}", color=colour, fontsize=8.5)
    figure.subplots_adjust(left=0.04, right=0.96, top=0.8, bottom=0.24)
    return figure


def load_figure(shares: Sequence[Sequence[float]], palette: Palette, width: float = WIDE) -> "Figure":
    """The share of router decisions, a row for each layer and a cell for each expert."""
    from matplotlib.patches import Rectangle

    layers, experts = len(shares), len(shares[0])
    figure, axes = _figure(width, 0.75 + 0.46 * layers, palette)
    largest = max(max(row) for row in shares)
    for layer, row in enumerate(shares):
        for expert, share in enumerate(row):
            # Shades of one colour by opacity, which works on a light page and on a dark one.
            alpha = 0.06 + 0.72 * share / largest
            cell = Rectangle((expert, layer), 0.95, 0.92, facecolor=palette.after, alpha=alpha, linewidth=0)
            axes.add_patch(cell)
            axes.text(
                expert + 0.475, layer + 0.46, f"{share:.0%}", ha="center", va="center", color=palette.ink, fontsize=9
            )
    axes.grid(visible=False)
    axes.set_xlim(0, experts)
    axes.set_ylim(layers, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(
        [expert + 0.475 for expert in range(experts)],
        [f"{'expert ' if width == WIDE else ''}{e}" for e in range(experts)],
    )
    axes.set_yticks([layer + 0.46 for layer in range(layers)], [f"layer {layer}" for layer in range(layers)])
    axes.xaxis.tick_top()
    figure.subplots_adjust(left=0.6 / width, right=0.995, top=1 - 0.38 / (0.75 + 0.46 * layers), bottom=0.02)
    return figure


def inline(figure: "Figure", name: str) -> str:
    """A figure as an SVG element for an HTML page: its colours are the page's, its ids begin with `name`.

    A name such as `loss-wide` is that of the caption, and a class of the page's.
    """
    import matplotlib

    buffer = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # An HTML parser knows these namespaces by itself.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    subject, _, kind = name.partition("-")
    return svg.replace("<svg ", f'<svg role="img" class="figure {kind}" aria-labelledby="{subject}-caption" ', 1)


def _figure(width: float, height: float, palette: Palette) -> "tuple[Figure, Axes]":
    figure = _new_figure(width, height)
    axes = figure.add_subplot()
    _style(axes, palette)
    return figure, axes


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    # Not pyplot: no global state, and no window system is looked for.
    return Figure(figsize=(width, height))


def _style(axes: "Axes", palette: Palette) -> None:
    axes.set_facecolor("none")
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.grid)
    axes.tick_params(colors=palette.muted, length=0, labelsize=9)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
