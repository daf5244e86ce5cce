"""Measure KPT's kernels beside their peers, and beside what this machine can do at best, all in one run.

    nox -s bench
    nox -s bench -- --quick --group decode --output figures.json
    python benchmarks/bench.py --device cuda

Every result is compared with float64 before it is timed: a row of which KPT's is wrong has no figures, exit code 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from devices import interpreted, measure_ceilings
from harness import GateError, Row, measure
from loads import GROUPS, LOADS
from rich.live import Live
from rich.table import Table

import kpt_core
from kpt_cli.bench.machine import machine
from kpt_cli.console import complain, out, say, table
from kpt_core.files import write_whole

LEGEND = """
How many times faster KPT is than the best peer and than everybody else; plain is KPT in plain PyTorch, without a
vendor's kernels; ~ means that 1 lies in the 99% interval, or the range of less than eight rounds; a trailing * means
one timing of one call. On a CPU decodes and products are timed four calls in a row, on other weights or experts each,
as a model's layers are called. Floor: the time that the call's bytes or products take at the rate that this machine
reached in turn with KPT, over KPT's time."""
Refused = tuple[str, str, str]


def table_of(rows: Sequence[Row | Refused]) -> Table:
    """Return the table of what is measured so far."""
    right = ("ms", "floor")
    made = table("what", "dtype", "kernel", *right, "best peer", "beside", right=right)
    for row in rows:
        if isinstance(row, tuple):
            made.add_row(row[0], row[1], "wrong")
            continue
        best = row.best_peer
        others = [result for result in row.results[1:] if result is not best]
        milliseconds = row.results[0].seconds * 1e3
        made.add_row(
            row.contest.title,
            row.contest.dtype,
            row.backend,
            f"{milliseconds:,.0f}" if milliseconds >= 99.95 else f"{milliseconds:#.3g}",
            f"{row.share.value:.0%}",
            "" if best is None else str(best),
            ", ".join(map(str, others)),
        )
    return made


def native_kernels() -> str:
    """Return whether there are native kernels for the CPU here, as a sentence."""
    backend = kpt_core.backends().get("cpu")
    if backend is None:
        return "kpt-backend-cpu is not installed: KPT runs in plain PyTorch"
    reason = backend.unavailable()
    return "kpt-backend-cpu serves" if reason is None else f"KPT runs in plain PyTorch: {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tell; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="small sizes and few rounds, some seconds")
    add("--group", action="append", choices=GROUPS, help="may be repeated; all if left out")
    add("--only", action="append", metavar="TEXT", help="rows whose title has this; may be repeated")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels are measured (default: %(default)s)")
    add("--interpret", action="store_true", help="with --device cuda: by Triton's interpreter, without a GPU")
    add("--threads", type=int, help="CPU threads; torch's own choice if left out")
    add("--seconds", type=float, default=3.0, help="about how long the timing of each row takes (default: %(default)g)")
    add("--seed", type=int, default=0, help="of weights, inputs and routings (default: %(default)s)")
    add("--output", "-o", type=Path, metavar="FILE", help="write the figures as JSON, anew after each row")
    options = parser.parse_args(arguments)
    if options.output is not None and not options.output.resolve().parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder; make it first")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.interpret or options.device == "cpu" else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: none is seen; --interpret --quick tries it without one")
    ceilings = measure_ceilings(device, quick=options.quick)
    say(f"{native_kernels()}. {torch.get_num_threads()} threads.")
    say(f"This machine at best: {ceilings}.\n")
    report: dict[str, Any] = {"benchmark": options.device, "machine": machine(), "ceilings": ceilings.as_dict()}
    rows: list[Row | Refused] = []
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if options.interpret:
            stack.enter_context(interpreted())
        live = stack.enter_context(Live("", console=out()))
        for load in LOADS[options.device][options.quick]:
            if load.group not in (options.group or GROUPS):
                continue
            contest = load.contest(device, options.seed)
            if options.only and not any(text in contest.title for text in options.only):
                continue
            try:
                row = measure(
                    contest, ceilings, min(options.seconds, 0.2) if options.quick else options.seconds, device
                )
                rows.append(row)
                lines.append(row.as_dict())
            except GateError as error:
                rows.append((contest.title, contest.dtype, str(error)))
                lines.append({"title": contest.title, "dtype": contest.dtype, "reason": str(error)})
            del contest  # before the next one's weights are made
            live.update(table_of(rows))
            if options.output is not None:
                write_whole(options.output, json.dumps(report | {"lines": lines}, indent=1) + "\n")
    say(LEGEND)
    refused = [row for row in rows if isinstance(row, tuple)]
    for _, _, reason in refused:
        complain("error", reason)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
