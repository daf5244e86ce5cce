"""SUMMARY.md: what all parts found so far, the table of the benchmark last."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import Row, first_line, read_rows

#: In the order in which they run.
PARTS = ("smoke", "conformance", "bench", "tune")
#: A line of `pytest -v` on a test that ended.
_OUTCOME = re.compile(r"^\S*::(.+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: \(.*\))? +\[ *\d+%\]$", re.MULTILINE)
_LEGEND = (
    "How many times faster ours is than each peer: medians of interleaved rounds, each with cold caches; ~ means that "
    "1 lies in the 99% interval. `dense` has as many operations and none of the routing. `graph` and `decode` run as "
    "CUDA graphs where a peer allows it. Floor: the time that bytes or products take at the best rate of this device, "
    "over ours."
)


def write_summary(out: Path) -> bool:
    """Write the summary of a report's folder.

    Returns:
        Whether every part that ran was complete and nothing of it failed or was lost.
    """
    jobs = {part: read_rows(out / part / "jobs.jsonl") for part in PARTS if (out / part).is_dir()}
    rows = {part: read_rows(out / part / "rows.jsonl") for part in jobs}
    trouble = [(p, row) for each in (jobs, rows) for p, found in each.items() for row in found if row["status"] != "ok"]
    failed = [(part, row) for part, row in trouble if row["status"] != "left out"]
    sections = ["# What ran on the device", "", *_facts(out / "environment.json"), ""]
    sections += ["| part | job | ending | minutes |", "|---|---|---|---|"]
    sections += [
        _line(p, job["name"], job["status"], round(job.get("seconds", 0) / 60, 1)) for p in jobs for job in jobs[p]
    ]
    for title, some in (
        ("What failed", failed),
        ("What was left out", [pair for pair in trouble if pair not in failed]),
    ):
        if some:
            sections += [f"\n## {title}\n", *(f"- {p}: **{row['name']}**: {first_line(row)}" for p, row in some)]
    sections += _smoke(rows.get("smoke", []))
    sections += _conformance(sorted((out / "conformance").glob("*.txt")))
    sections += _tuning(rows.get("tune", []))
    for part, title in (("bench", "Benchmark"), ("tune", "Benchmark, tuned")):
        files = sorted((out / part).glob("*.json"), key=lambda file: file.stat().st_mtime)
        measured = [line for file in files for line in json.loads(file.read_text())["lines"]]
        if measured:
            sections += [f"\n## {title}\n\n{_LEGEND}\n", *_benchmark(measured)]
    write_whole(out / "SUMMARY.md", "\n".join(sections) + "\n")
    return not failed


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


def _smoke(rows: list[Row]) -> Iterator[str]:
    timed = [row for row in rows if "seconds" in row]
    if timed:
        yield "\n## Smoke: first and second call, seconds\n"
        yield "| kernel and case | forward | again | forward and backward | again |"
        yield "|---|---|---|---|---|"
        yield from (_line(row["name"], *(f"{taken:.3f}" for taken in row["seconds"])) for row in timed)


def _conformance(logs: list[Path]) -> Iterator[str]:
    """Count what pytest said of each test: that is there of a run that was stopped or crashed, too."""
    if logs:
        yield "\n## Conformance\n"
        yield "| kernel | passed | skipped or refused | failed | failing |"
        yield "|---|---|---|---|---|"
    for log in logs:
        found = _OUTCOME.findall(log.read_text(errors="replace"))
        failing = [test for test, outcome in found if outcome in ("FAILED", "ERROR")]
        counts = [sum(outcome in some for _, outcome in found) for some in (("PASSED",), ("SKIPPED", "XFAIL"))]
        names = [f"`{test.partition('[')[2].rstrip(']') or test}`" for test in failing[:5]]
        more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
        yield _line(log.stem, *counts, len(failing), "<br>".join(names) + more)


def _tuning(rows: list[Row]) -> Iterator[str]:
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


def _benchmark(lines: list[Row]) -> Iterator[str]:
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
    yield from (f"\n**{line['title']}, {line['dtype']}**: {line['reason']}" for line in lines if "reason" in line)
    wanted = [(f"{row['group']} {row['name']}", *target) for row in rows for target in row["targets"]]
    if wanted:
        yield "\nWhat is wanted on an H200:\n\n| row | figure | wanted | got | |\n|---|---|---|---|---|"
    for title, name, bound, got, met in wanted:
        most = "at most" if name == "saved" else "at least"
        yield _line(title, name, f"{most} {bound:,.4g}", f"{got:,.4g}", "met" if met else "**missed**")
