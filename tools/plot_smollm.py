"""Draw the README's plot of a language model's speed, size and quality, and write what stands below it.

    python tools/plot_smollm.py      # writes docs/images/smollm.svg, and README.md between its two comments

Both are of the report that is committed, as a test sees to; `benchmarks/smollm.py --json` makes it.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks/results/smollm.json"
PLOT = ROOT / "docs/images/smollm.svg"
README = ROOT / "README.md"
#: Where the README holds what is written here.
PLACE = re.compile(r"(?<=<!-- tools/plot_smollm.py writes this -->\n).*?(?=<!-- to here -->)", re.S)
#: So wide that letters are legible on a telephone, where the plot is 400 pixels wide.
WIDTH, STEP, TOP = 400, 78, 52
#: Heights of a row's bars, of tokens a second and of bytes, and the width of the longest.
BARS, LONGEST = (22, 10), WIDTH - 120
KPT, PEER = "#3f51b5", "#9e9e9e"


def told(report: dict[str, Any]) -> str:
    """Return in words what the plot shows."""
    return "; ".join(
        f"{each['name']}: {each['tokens_per_second']:.1f} tokens/s, {each['bytes'] / 2**20:.0f} MiB, "
        f"{each['bits_per_byte']:.3f} bits per byte"
        for each in report["figures"]
    )


def below(report: dict[str, Any]) -> str:
    """Return what the README says: the picture, the gains and the losses."""
    base, gemv, lossless, kpt = report["figures"]
    gains, small = ([f"{each[name]:.2f}x" for name in ("gain", "many_gain", "prompt_gain")] for each in (lossless, kpt))
    beside = [each["tokens_per_second"] / gemv["tokens_per_second"] for each in (lossless, kpt)]
    text = (
        "SmolLM2-135M in bfloat16 with KPT's attention and linear layers, its weights as they are, generates {} as "
        "fast as installed (SDPA, oneDNN), with eight requests {}, and reads a prompt {} as fast. ".format(*gains)
        + f"With 8-bit linear layers it has {kpt['bytes'] / base['bytes']:.2f}x the bytes, and generates "
        + "{}, {}, and reads {} as fast".format(*small)
        + f", for {kpt['bits_per_byte'] / base['bits_per_byte'] - 1:.1%} more bits per byte of text. "
        "Beside torch's own GEMV, which serves one request with oneDNN off, that is {:.2f}x and {:.2f}x ".format(
            *beside
        )
        + f"({report['machine']}, {report['date']}; [report]({REPORT.relative_to(ROOT)}))."
    )
    image = f'<img src="{PLOT.relative_to(ROOT)}" width="400" alt="SmolLM2-135M, one request. {told(report)}.">'
    return f"{image}\n\n{textwrap.fill(text, 155, break_long_words=False, break_on_hyphens=False)}\n"


def draw(report: dict[str, Any]) -> str:
    """Return the plot as SVG: for each way to run the model a bar of its tokens a second and one of its bytes."""
    figures = report["figures"]
    fastest, largest = (max(each[name] for each in figures) for name in ("tokens_per_second", "bytes"))
    height = TOP + STEP * len(figures) + 30
    lines = []
    for place, each in enumerate(figures):
        y = TOP + STEP * place
        rate, size = f"{each['tokens_per_second']:.1f} tokens/s", f"{each['bytes'] / 2**20:.0f} MiB"
        quality = f"{each['bits_per_byte']:.3f} bits per byte"
        fill = KPT if "KPT" in each["name"] else PEER
        wide = round(LONGEST * each["tokens_per_second"] / fastest)
        thin = round(LONGEST * each["bytes"] / largest)
        lines += [
            f'<text x="8" y="{y}">{each["name"]}</text>',
            f'<text x="{WIDTH - 8}" y="{y}" text-anchor="end">{quality}</text>',
            f'<rect x="8" y="{y + 6}" width="{wide}" height="{BARS[0]}" rx="3" fill="{fill}"/>',
            f'<text x="{wide + 14}" y="{y + 22}" font-weight="bold">{rate}</text>',
            f'<rect x="8" y="{y + 33}" width="{thin}" height="{BARS[1]}" rx="3" fill="{fill}" opacity="0.45"/>',
            f'<text x="{thin + 14}" y="{y + 42}">{size}</text>',
        ]
    versions = f"torch {report['versions']['torch'].partition('+')[0]}, {report['date']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12.5" fill="#212121">',
            f"<title>{told(report)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fafafa"/>',
            '<text x="8" y="22" font-size="14" font-weight="bold">SmolLM2-135M, one request: speed and weights</text>',
            *lines,
            f'<text x="8" y="{height - 10}" font-size="11">{report["machine"]}, {versions}</text>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    found = json.loads(REPORT.read_text(encoding="utf-8"))
    PLOT.write_text(draw(found), encoding="utf-8")
    README.write_text(PLACE.sub(lambda _: below(found), README.read_text(encoding="utf-8")), encoding="utf-8")
