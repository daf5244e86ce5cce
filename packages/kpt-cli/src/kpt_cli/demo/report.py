"""The report: one HTML page that needs nothing else, its figures as JSON, and the loss curve as a picture."""

import json
import math
import re
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import CONFIDENCE, NOISE, TRAINING, Figures
from .settings import KIND, REPORT

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

PAGE = "report.html"
FORMAT = 3
#: Inches of a figure on a page of full width, and on a telephone's.
WIDE, NARROW = 7.6, 3.5


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by what they are for."""

    ink: str
    muted: str
    grid: str
    before: str
    after: str
    held_out: str


#: For files that stand alone.
PAPER = Palette("#1c2430", "#667080", "#dde2e8", "#9aa4b2", "#2862c8", "#d4622a")
#: Stand-ins that `inline` replaces by the page's variables, so that figures follow it into dark mode.
CSS = Palette("#010101", "#020202", "#030303", "#040404", "#050505", "#060606")


def write_report(result: Figures, folder: Path) -> Figures:
    """Write page, JSON and picture into a folder, and return what is in the JSON."""
    loss_figure(result, PAPER).savefig(folder / "loss.png", dpi=160, facecolor="white")
    (folder / PAGE).write_text(page(result), encoding="utf-8")
    document = {"kind": KIND, "format": FORMAT} | result | {"plan": result["plan"].as_dict()}
    (folder / REPORT).write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    return document


def page(result: Figures) -> str:
    """Return the HTML page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=PackageLoader("kpt_cli.demo"), autoescape=True, undefined=StrictUndefined)
    environment.filters["breakable"] = breakable
    environment.trim_blocks = environment.lstrip_blocks = True
    drawn = (
        inline(loss_figure(result, CSS, width), f"loss-{kind}") for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    names = {"size": result["settings"], "confidence": CONFIDENCE, "NOISE": NOISE, "TRAINING": TRAINING}
    return environment.get_template("report.html.j2").render(result=result, loss=Markup("".join(drawn)), **names)


def breakable(path: str) -> "Markup":
    """Return a dotted name that a narrow column may break after its dots."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[.:])", path))


def loss_figure(result: Figures, palette: Palette, width: float = WIDE) -> "Figure":
    """Draw the loss over training: each batch, their running mean, and held-out text."""
    from matplotlib.figure import Figure

    # Not pyplot: no global state, and no window system is looked for.
    figure = Figure(figsize=(width, 3.3))
    axes = figure.add_subplot(facecolor="none", axisbelow=True)
    axes.grid(axis="y", color=palette.grid, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.grid)
    axes.tick_params(colors=palette.muted, length=0, labelsize=9)
    losses, vocabulary = result["training"]["losses"], result["settings"]["vocabulary"]
    last = len(losses)
    window = max(3, last // 25)
    parts = (losses[max(0, end - window) : end] for end in range(1, last + 1))
    smooth = [sum(part) / len(part) for part in parts]
    axes.plot(range(1, last + 1), losses, color=palette.after, alpha=0.25, linewidth=0.8)
    axes.plot(range(1, last + 1), smooth, color=palette.after, linewidth=1.8)
    held_steps, held = zip(*result["training"]["held_out"], strict=True)
    axes.plot(held_steps, held, color=palette.held_out, linewidth=1.2, marker="o", markersize=4, clip_on=False)
    guess = math.log(vocabulary)
    axes.axhline(guess, color=palette.muted, linewidth=0.8, linestyle=(0, (2, 3)))
    note = f"guessing among {vocabulary:,} tokens: {guess:.2f}" if width == WIDE else f"guessing: {guess:.2f}"
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "annotation_clip": False}
    axes.annotate(note, (last, guess), (0, 4), ha="right", color=palette.muted, **style)
    # Labels at the ends of the lines instead of a legend, kept apart where the lines meet.
    ends = sorted(((held[-1], "held-out", palette.held_out), (smooth[-1], "training", palette.after)), reverse=True)
    for (value, name, colour), shift in zip(ends, (5, -5), strict=True):
        axes.annotate(f"{name} {value:.2f}", (last, value), (8, shift), va="center", color=colour, **style)
    axes.set_xlabel("training step", color=palette.muted)
    axes.set_ylabel("cross-entropy, nats per token", color=palette.muted)
    axes.set_xlim(0, last)
    top = max(guess, *held, *smooth)
    axes.set_ylim(top=top + 0.08 * (top - min(losses)) + 0.05)
    figure.subplots_adjust(left=0.6 / width, right=1 - 1.1 / width, top=0.97, bottom=0.15)
    return figure


def inline(figure: "Figure", name: str) -> str:
    """Return a figure as an SVG element for an HTML page: its colours are the page's, its ids begin with `name`.

    A name such as `loss-wide` is that of the caption, and a class of the page's.
    """
    import matplotlib

    buffer = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    # An HTML parser knows these namespaces by itself.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    for colour in fields(Palette):
        svg = svg.replace(getattr(CSS, colour.name), f"var(--{colour.name.replace('_', '-')})")
    subject, _, kind = name.partition("-")
    return svg.replace("<svg ", f'<svg role="img" class="figure {kind}" aria-labelledby="{subject}-caption" ', 1)
