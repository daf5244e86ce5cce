"""SUMMARY.md: what all parts found so far, the table of the benchmark last."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .plan import PARTS, write_whole
from .rows import Row, read_lines

#: Phases of a row's results, in the order in which they stand.
_KINDS = ("forward", "graph", "forward+backward", "backward", "decode")
_LEGEND = (
    "How many times faster ours is than each peer: medians of interleaved rounds, each with cold caches. "
    "A dense product has as many operations and none of the routing. "
    "`graph` and `decode` run as CUDA graphs where a peer allows it."
)


def write_summary(out: Path) -> bool:
    """Write the summary of a report's folder.

    Returns:
        Whether every part that ran was complete and nothing of it failed or was lost.
    """
    parts = [part for part in PARTS if (out / part / "state.json").exists()]
    rows = {part: read_lines(out / part / "rows.jsonl") for part in parts}
    states = {part: _json(out / part / "state.json") for part in parts}
    sections = ["# What ran on the device", *_facts(_json(out / "environment.json"))]
    sections += ["| part | ending | minutes | ok | failed | lost | left out |", "|---|---|---|---|---|---|---|"]
    for part in parts:
        counts = [sum(row["status"] == status for row in rows[part]) for status in ("ok", "failed", "lost", "left out")]
        sections.append(_line(part, states[part].get("ending", "?"), states[part].get("minutes", "?"), *counts))
    sections += _troubles(rows)
    if "smoke" in rows:
        sections += _smoke(rows["smoke"])
    if "conformance" in rows:
        sections += _conformance(rows["conformance"])
    if "tune" in rows:
        sections += _tuning(rows["tune"])
    for part in ("bench", "tune"):
        measured = [row for row in rows.get(part, []) if row["status"] == "ok" and "results" in row]
        others = [row for row in rows.get(part, []) if row["status"] == "ok" and "targets" in row]
        title = "Benchmark" if part == "bench" else "Benchmark, tuned"
        if others:
            sections += _targets(title, others)
        if measured:
            sections += _table(title, measured)
    write_whole(out / "SUMMARY.md", "\n".join(sections) + "\n")
    whole = all(states[part].get("ending") == "complete" for part in parts)
    return whole and not any(row["status"] in ("failed", "lost") for part in parts for row in rows[part])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _facts(facts: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"- device: {facts.get('device', 'unknown')}"
    if facts.get("interpreted"):
        yield (
            "- **Triton's interpreter took the GPU's place**, with float32 for bfloat16; figures mean nothing. A "
            "stand-in for the backend offers its kernels to the CPU; smoke and conformance call them past dispatch."
        )
    if facts.get("tiny"):
        yield "- **tiny sizes**: this tried the program, not the kernels"
    driver = (facts.get("environment") or {}).get("driver")
    yield f"- commit: {facts.get('commit') or 'unknown'}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in (facts.get('versions') or {}).items())}"
    if driver:
        yield f"- driver: {driver if isinstance(driver, str) else driver.get('version') or 'none'}"
    yield ""


def _troubles(rows: dict[str, list[Row]]) -> Iterator[str]:
    found = [(part, row) for part, of_part in rows.items() for row in of_part if row["status"] in ("failed", "lost")]
    if found:
        yield "\n## What failed\n"
        for part, row in found:
            yield f"- {part}: **{row['name']}**: {_first(row.get('error', ''))}"
    left_out = [(part, row) for part, of_part in rows.items() for row in of_part if row["status"] == "left out"]
    if left_out:
        yield "\n## What was left out\n"
        yield from (f"- {part}: {row['name']}: {_first(row.get('reason', ''))}" for part, row in left_out)


def _first(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _smoke(rows: list[Row]) -> Iterator[str]:
    yield "\n## Smoke: first and second call, seconds\n"
    yield "| kernel and case | forward | again | forward and backward | again |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if "first forward" in row:
            kinds = ("first forward", "second forward", "first forward and backward", "second forward and backward")
            yield _line(row["name"], *(f"{row[kind]:.3f}" for kind in kinds))


def _conformance(rows: list[Row]) -> Iterator[str]:
    yield "\n## Conformance\n"
    yield "| kernel | outcomes | not run | failing |"
    yield "|---|---|---|---|"
    for row in rows:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(row.get("counts", {}).items()))
        failing = row.get("failing", [])
        more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
        yield _line(
            row["name"], counts, row.get("not_run", "?"), "<br>".join(f"`{_short(f)}`" for f in failing[:5]) + more
        )


def _short(test: str) -> str:
    return test.rpartition("[")[2].rstrip("]") or test


def _tuning(rows: list[Row]) -> Iterator[str]:
    yield "\n## Tuning\n"
    yield "| trial | winner | over untuned |"
    yield "|---|---|---|"
    for row in rows:
        if "entry" in row:
            entry = row["entry"]
            stays = (entry["kernel"], entry["config"]) == (entry["default"], None)
            config = " ".join(f"{name}={value}" for name, value in (entry["config"] or {}).items() if value)
            winner = "the default stays" if stays else f"{entry['kernel']} {config}"
            yield _line(row["name"], winner, f"{entry['gain']:.2f}x ± {entry['noise']:.2f}")


def _targets(title: str, rows: list[Row]) -> Iterator[str]:
    lines = [(row["name"], target) for row in rows for target in row["targets"]]
    if lines:
        yield f"\n## {title}: what is wanted on an H200\n"
        yield "| row | what | wanted | got | |"
        yield "|---|---|---|---|---|"
        for name, target in lines:
            wanted = f"{'at most' if target['most'] else 'at least'} {_number(target['wanted'])}"
            yield _line(name, target["what"], wanted, _number(target["got"]), "met" if target["met"] else "**missed**")


def _table(title: str, rows: list[Row]) -> Iterator[str]:
    peers = list(dict.fromkeys(name for row in rows for name in row["results"] if name != "kpt"))
    yield f"\n## {title}\n\n{_LEGEND}\n"
    cells = ["experts", "phase", "ms", "TFLOP/s", "tokens/s", "of copy bandwidth", "saved", *peers]
    yield _line(*cells)
    yield "|---" * len(cells) + "|"
    for row in rows:
        ours = row["results"]["kpt"]
        for kind in _KINDS:
            if kind in ours:
                figures = ours[kind]
                share = f"{figures['of_copy']:.0%}" if "of_copy" in figures else ""
                saved = f"{ours['saved_over_least']:.2f}x" if "saved_over_least" in ours and kind != "backward" else ""
                shown = (
                    f"{figures['seconds'] * 1e3:.3f}",
                    f"{figures['tflops']:.0f}",
                    _number(figures["tokens_per_second"]),
                )
                yield _line(row["load"], kind, *shown, share, saved, *_over(row["results"], peers, kind))


def _over(results: dict[str, Row], peers: Iterable[str], kind: str) -> Iterator[str]:
    for peer in peers:
        figures = results.get(peer, {}).get(kind)
        if figures is None:
            yield "-"
            continue
        near = abs(figures["kpt_is_faster"] - 1) < 2 * figures["noise"]
        yield f"{'~' if near else ''}{figures['kpt_is_faster']:.2f}x"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
