"""SUMMARY.md: what all commands found so far, the table of the benchmark last."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rows import Row, first_line, of_kind, read_rows

#: In the order in which they are told.
PARTS = ("prove", "suite", "tune")
#: A kernel in the name of a test of the suite.
_KERNEL = re.compile(r"[a-z0-9_.]+:[a-z0-9_]+")
_LEGEND = (
    "How many times faster ours is than each peer: medians of interleaved rounds, each with cold caches; ~ means that "
    "1 lies in the 99% interval. `dense` has as many operations and none of the routing. `graph` and `decode` run as "
    "CUDA graphs where a peer allows it. Floor: the time that bytes or products take at the best rate of this device, "
    "over ours."
)


def write_summary(out: Path) -> bool:
    """Write the summary of a report's folder.

    Returns:
        Whether all that was begun was complete and nothing of it failed or was lost.
    """
    phases = [(part, row) for part in PARTS for row in read_rows(out / part / "phases.jsonl")]
    rows = {part: read_rows(out / part / "rows.jsonl") for part in PARTS}
    trouble = [(part, row) for part, found in rows.items() for row in found if row["status"] != "ok"]
    failed = [(part, row) for part, row in trouble if row["status"] != "left out"]
    sections = ["# What ran on the device", "", *_facts(out / "environment.json"), ""]
    sections += ["| command | phase | ending | minutes |", "|---|---|---|---|"]
    sections += [_line(part, row["name"], row["status"], round(row["seconds"] / 60, 1)) for part, row in phases]
    suite = rows.pop("suite")
    told = [pair for pair in trouble if pair[0] != "suite" or pair in failed]  # the suite's table counts the others
    for title, some in (("What failed", failed), ("What was left out", [pair for pair in told if pair not in failed])):
        if some:
            sections += [f"\n## {title}\n", *(f"- {p}: **{row['name']}**: {first_line(row)}" for p, row in some)]
    proven = rows["prove"]
    sections += _numbers([*of_kind(proven, "numbers")])
    sections += _times([*of_kind(proven, "times")])
    sections += _choices([*of_kind(proven, "choices")])
    sections += _suite(suite)
    sections += _tuning([*of_kind(rows["tune"], "tuning")])
    measured = [row["line"] for row in of_kind(proven, "peers") if "line" in row]
    if measured:
        sections += [f"\n## Beside peers\n\n{_LEGEND}\n", *_benchmark(measured)]
    write_whole(out / "SUMMARY.md", "\n".join(sections) + "\n")
    return not failed and all(row["status"] in ("ok", "left out") for _, row in phases)


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a reader never meets a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _facts(file: Path) -> Iterator[str]:
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    yield f"- device: {facts.get('device', 'unknown')}"
    if facts.get("interpreted"):
        yield (
            "- **Triton's interpreter took the GPU's place**, with float32 for bfloat16; figures mean nothing. A "
            "stand-in for the backend offers its kernels to the CPU."
        )
    yield f"- commit: {facts.get('commit') or 'unknown'}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in facts.get('versions', {}).items())}"
    driver = facts.get("environment", {}).get("driver")
    if driver:
        yield f"- driver: {driver if isinstance(driver, str) else driver.get('version') or 'none'}"


def _numbers(rows: Sequence[Row]) -> Iterator[str]:
    timed = [row for row in rows if row.get("seconds")]
    if timed:
        yield "\n## Numbers are right: first and second call, seconds\n"
        yield "| kernel and case | forward | again | forward and backward | again |"
        yield "|---|---|---|---|---|"
    for row in timed:
        yield _line(row["name"], *[f"{taken:.3f}" for taken in row["seconds"]], *[""] * (4 - len(row["seconds"])))


def _times(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "\n## Time of each program\n"
        yield "Of a call, with its gradients where it has some; `of dense`: beside the rate of a large bf16 product.\n"
        yield _line(
            "call", "µs", "TFLOP/s", "of dense", "MHz", "program", "µs each", "launches", "registers", "blocks an SM"
        )
        yield "|---" * 10 + "|"
    for row in rows:
        whole = [row["name"], row.get("us", ""), row.get("TFLOP/s", ""), row.get("of_dense", "")]
        whole.append((row.get("clocks") or {}).get("MHz", ""))
        for each in row.get("programs", [])[:6] or [{}]:
            own = (each.get(name, "") for name in ("program", "us", "launches", "registers", "blocks_per_sm"))
            yield _line(*whole, *own)
            whole = [""] * len(whole)


def _choices(rows: Sequence[Row]) -> Iterator[str]:
    found = [row for row in rows if "sides" in row]
    if found:
        yield "\n## A and B, in turn\n"
        yield "| choice | side | ms | times as fast as the first |"
        yield "|---|---|---|---|"
    for row in found:
        for name, side in row["sides"].items():
            yield _line(row["name"], name, *side.values())


def _suite(rows: Sequence[Row]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        named = _KERNEL.search(row["name"])
        counts.setdefault("other tests" if named is None else named[0], Counter())[row["status"]] += 1
    if counts:
        yield "\n## Conformance, in part\n"
        yield "| kernel | passed | skipped or refused | failed | lost |"
        yield "|---|---|---|---|---|"
    for kernel, found in counts.items():
        yield _line(kernel, *(found[status] for status in ("ok", "left out", "failed", "lost")))


def _tuning(rows: Sequence[Row]) -> Iterator[str]:
    tuned = [row for row in rows if "entry" in row]
    if tuned:
        yield "\n## Tuning\n"
        yield "| trial | winner | over untuned |"
        yield "|---|---|---|"
    for row in tuned:
        entry = row["entry"]
        stays = (entry["kernel"], entry["config"]) == (entry["default"], None)
        config = " ".join(f"{name}={value}" for name, value in (entry["config"] or {}).items() if value)
        winner = "the default stays" if stays else f"{entry['kernel']} {config}"
        yield _line(row["name"], winner, f"{entry['gain']:.2f}x ± {entry['noise']:.2f}")


def _benchmark(lines: Sequence[Row]) -> Iterator[str]:
    rows = [line for line in lines if "results" in line]
    peers = list(dict.fromkeys(r["implementation"] for row in rows for r in row["results"][1:]))
    cells = ["what", "dtype", "ms", "TFLOP/s", "tokens/s", "floor", "saved", *peers]
    yield _line(*cells)
    yield "|---" * len(cells) + "|"
    for row in rows:
        figures, (kpt, *others) = row["figures"], row["results"]
        gains = {r["implementation"]: r["gain"] for r in others}
        ratios = [
            "-" if gain is None else f"{'~' if gain['low'] <= 1 <= gain['high'] else ''}{gain['value']:.2f}x"
            for gain in map(gains.get, peers)
        ]
        shown = [f"{kpt['seconds'] * 1e3:.3f}", f"{figures['TFLOP/s']:.0f}", f"{figures['tokens/s']:,.0f}"]
        saved = f"{figures['saved']:.2f}x" if "saved" in figures else ""
        yield _line(f"{row['group']} {row['name']}", row["dtype"], *shown, f"{figures['floor']:.0%}", saved, *ratios)
    wanted = [(f"{row['group']} {row['name']}", *target) for row in rows for target in row["targets"]]
    if wanted:
        yield "\nWhat is wanted on an H200:\n\n| row | figure | wanted | got | |\n|---|---|---|---|---|"
    for title, name, bound, got, met in wanted:
        most = "at most" if name == "saved" else "at least"
        yield _line(title, name, f"{most} {bound:,.4g}", f"{got:,.4g}", "met" if met else "**missed**")
