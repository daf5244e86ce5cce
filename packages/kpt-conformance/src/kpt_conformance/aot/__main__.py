"""`python -m kpt_conformance.aot`: compile every kernel for every chip that its backend claims."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import kpt_core
from kpt_conformance.report import report_compiled
from kpt_core import KptError, PluginWarning
from kpt_core.files import write_whole
from kpt_core.registry import problems

from .declared import without_aot
from .matrix import run
from .tables import page, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix and print it; 1 if a contract is broken or something could not be compiled, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m kpt_conformance.aot", description=__doc__)
    parser.add_argument("--backend", action="append", metavar="NAME", help="this backend only; may be repeated")
    parser.add_argument("--chip", action="append", metavar="CHIP", help="this chip only; may be repeated")
    parser.add_argument("--op", action="append", metavar="TEXT", help="ops whose names begin so; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write registers, memory and occupancy as Markdown")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was compiled as a report of the run")
    parser.add_argument("--jobs", type=int, metavar="N", help="compile so many at the same time (default: CPUs)")
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    for name in ("json", "table", "report"):
        file: Path | None = getattr(options, name)
        if file is not None and not file.parent.is_dir():
            parser.error(f"--{name}: there is no folder {str(file.parent)!r}")
        if file is not None and file.is_dir():
            parser.error(f"--{name}: expected a file name, got the folder {str(file)!r}")
    progress = _progress if sys.stderr.isatty() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)  # told below, and counted
            rows = run(
                backends=options.backend,
                chips=options.chip,
                ops=options.op,
                processes=options.jobs,
                progress=progress,
            )
            broken = problems()
    except KptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        write_whole(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.table is not None:
        write_whole(options.table, page(rows))
    if options.report is not None:
        asked = [f"--chip {chip}" for chip in options.chip or ()] + [f"--op {op}" for op in options.op or ()]
        asked += [f"{name}={value}" for name, value in os.environ.items() if name.startswith("KPT_AOT_")]
        report_compiled(options.report, rows, Path.cwd(), ", ".join(asked) or "all")
    print(table(rows) if rows else _nothing(options.backend, options.chip, options.op))
    for problem in broken:
        print(f"broken: {problem}")
    return 0 if all(row.good for row in rows) and not broken else 1


def _nothing(backends: Sequence[str] | None, chips: Sequence[str] | None, ops: Sequence[str] | None) -> str:
    installed = kpt_core.backends()
    looked_at = {name: backend for name, backend in installed.items() if backends is None or name in backends}
    others = len(without_aot(looked_at))
    for_chips = f" for {', '.join(chips)}" if chips else ""
    if ops:
        return f"nothing to compile{for_chips}: no kernel of an op that begins with {' or '.join(ops)} names an aot"
    return f"nothing to compile{for_chips}: none of the {others} kernels of {len(looked_at)} backends names an aot"


def _progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rcompiled {done} of {total}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
