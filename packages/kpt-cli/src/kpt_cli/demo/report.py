"""The report: one HTML page that needs nothing else, its figures as JSON, and the loss curve as a picture."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .comparison import CONFIDENCE, NOISE
from .kernels import pattern
from .memory import TRAINING
from .output import REPORT
from .plots import CSS, NARROW, PAPER, WIDE, comparison_figure, inline, load_figure, loss_figure
from .result import MEMORY_MEASURE
from .terminal import why

if TYPE_CHECKING:
    from .result import Result

PAGE = "report.html"
LOSS = "loss.png"


def write_report(result: "Result", folder: Path) -> None:
    """Write page, JSON and picture into a folder."""
    loss_figure(result.training, result.model["vocabulary"], PAPER).savefig(folder / LOSS, dpi=160, facecolor="white")
    (folder / PAGE).write_text(page(result), encoding="utf-8")
    document = json.dumps(result.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / REPORT).write_text(document + "\n", encoding="utf-8")


def page(result: "Result") -> str:
    """The HTML page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("kpt_cli.demo"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures: dict[str, list[str]] = {"loss": [], "comparison": [], "load": []}
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        loss = loss_figure(result.training, result.model["vocabulary"], CSS, width)
        figures["loss"].append(inline(loss, f"loss-{kind}"))
        figures["load"].append(inline(load_figure(result.quality.expert_load, CSS, width), f"load-{kind}"))
    for number, comparison in enumerate(result.comparisons):
        drawn = comparison_figure(comparison, result.libraries, CSS)
        figures["comparison"].append(inline(drawn, f"comparison-small{number}"))
    return environment.get_template("report.html.j2").render(
        result=result,
        tiles=_tiles(result),
        figures={name: Markup("".join(drawn)) for name, drawn in figures.items()},
        kernels=[(pattern(use.modules), use, why(use.kernel, use.reasons)) for use in result.kernels],
        balance=_balance(result.quality.expert_load),
        identical=sum(sample.identical for sample in result.samples),
        memory_measure=MEMORY_MEASURE,
        guess=math.log(result.model["vocabulary"]),
        confidence=CONFIDENCE,
        NOISE=NOISE,
    )


def _tiles(result: "Result") -> list[dict[str, Any]]:
    """The figures that the page begins with."""
    held_out = result.training.held_out
    quality = result.quality
    tiles = [
        {
            "label": "held-out loss",
            "value": f"{held_out[0][1]:.2f} → {held_out[-1][1]:.2f}",
            "note": f"in {result.training.seconds:.0f} s of training",
            "good": False,
        }
    ]
    for comparison in (*result.comparisons[:2], *(c for c in result.comparisons if c.name == TRAINING)):
        tiles.append(
            {
                "label": comparison.name,
                "value": comparison.verdict,
                "note": f"{comparison.interval}; {comparison.before.median:,.0f} → {comparison.after.median:,.0f} "
                f"{comparison.unit}",
                "good": comparison.beyond_noise and comparison.gain > 1,
            }
        )
    tiles.append(
        {
            "label": "weights",
            "value": f"{result.plan.bytes_before / 2**20:.1f} → {result.plan.bytes_after / 2**20:.1f} MiB",
            "note": "in memory, before and after",
            "good": result.plan.bytes_after < result.plan.bytes_before,
        }
    )
    tiles.append(
        {
            "label": "perplexity",
            "value": f"{quality.after.perplexity / quality.before.perplexity - 1:+.2%}",
            "note": f"{quality.before.perplexity:.2f} → {quality.after.perplexity:.2f} on held-out files",
            "good": False,
        }
    )
    return tiles


def _balance(shares: Sequence[Sequence[float]]) -> str:
    """The busiest and the idlest expert as a sentence."""
    flat = [(share, layer, expert) for layer, row in enumerate(shares) for expert, share in enumerate(row)]
    (high, *busiest), (low, *idlest) = max(flat), min(flat)
    even = 1 / len(shares[0])
    return (
        f"An even share would be {even:.1%}. The busiest is expert {busiest[1]} of layer {busiest[0]} with {high:.1%}, "
        f"the idlest expert {idlest[1]} of layer {idlest[0]} with {low:.1%}."
    )
