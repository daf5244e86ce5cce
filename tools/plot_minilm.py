"""Draw the README's plot, a real model's size beside its quality, from the report that is committed.

    python tools/plot_minilm.py      # writes docs/images/minilm.svg

A test compares the file with what this program draws. `packages/kpt-fp8/benchmarks/minilm.py --json` makes the report.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks/results/minilm-fp8-2026-11-26.json"
PLOT = ROOT / "docs/images/minilm.svg"
#: Which figures are shown, and what they are called.
ROWS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "planned, row": "FP8, the layers of a plan",
    "all, row": "FP8, all linear layers",
    "bfloat16 and all, row": "bfloat16, linear layers FP8",
}
#: So wide that letters are legible on a telephone, where the plot is 400 pixels wide.
WIDTH, BAR, STEP, TOP = 400, 22, 46, 50


def draw(report: dict[str, Any]) -> str:
    """Return the plot as SVG: for each way to hold the weights a bar of its bytes, its quality and its time."""
    figures = {each["name"]: each for each in report["figures"]}
    shown = {label: figures[name] for name, label in ROWS.items() if name in figures}
    height = TOP + STEP * len(shown) + 34
    told = []
    lines = []
    for place, (label, each) in enumerate(shown.items()):
        size = (report["bytes"] - each["saved"]) / 2**20
        width = round((WIDTH - 130) * each["share"])
        y = TOP + STEP * place
        quality = f"cosine {each['least_cosine']:.4f}, time {1 / each['gain']:.2f}x"
        fill = "#3f51b5" if "FP8" in label else "#9e9e9e"
        told.append(f"{label}: {size:.0f} MiB, {quality}")
        lines += [
            f'<text x="8" y="{y}">{label}</text>',
            f'<text x="{WIDTH - 8}" y="{y}" text-anchor="end">{quality}</text>',
            f'<rect x="8" y="{y + 5}" width="{width}" height="{BAR}" rx="3" fill="{fill}"/>',
            f'<text x="{width + 14}" y="{y + 21}" font-weight="bold">{size:.0f} MiB</text>',
        ]
    versions = f"torch {report['versions']['torch'].partition('+')[0]}, {report['date']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12.5" fill="#212121">',
            f"<title>{'; '.join(told)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fafafa"/>',
            '<text x="8" y="20" font-size="14" font-weight="bold">MiniLM-L6: weights in memory</text>',
            *lines,
            f'<text x="8" y="{height - 22}" font-size="11">cosine: worst of 96 sentences; time: of one sentence</text>',
            f'<text x="8" y="{height - 8}" font-size="11">{report["machine"]}, {versions}</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(draw(json.loads(REPORT.read_text(encoding="utf-8"))), encoding="utf-8")
