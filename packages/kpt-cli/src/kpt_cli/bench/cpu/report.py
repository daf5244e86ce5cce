"""What is shown of rows: the table, and the sentence on kernels."""

from collections.abc import Sequence

from rich.table import Table

import kpt_core
from kpt_cli.bench.moe import Refused
from kpt_cli.console import table

from .contest import Result, Row

LEGEND = """
How many times faster KPT is than the best peer and than everybody else; plain is KPT in plain PyTorch, without a
vendor's kernels; ~ means within two standard errors of 1, a trailing * one timing of one call. Decodes and products are
timed four calls in a row, on other weights or experts each, as a model's layers are called. Floor: the time that the
call's bytes or products take at the rate that this machine reached in turn with KPT, over KPT's time."""


def table_of(rows: Sequence[Row | Refused]) -> Table:
    """The table of what is measured so far."""
    right = ("ms", "floor")
    made = table("what", "dtype", "kernel", *right, "best peer", "beside", right=right)
    for row in rows:
        if isinstance(row, Refused):
            made.add_row(row.title, row.dtype, "wrong")
            continue
        best = row.best_peer
        others = [result for result in row.results[1:] if result is not best]
        made.add_row(
            row.title,
            row.contest.dtype,
            row.backend,
            milliseconds(row.results[0].seconds),
            f"{row.share:.0%}",
            "" if best is None else _times(best),
            ", ".join(_times(result) for result in others),
        )
    return made


def milliseconds(seconds: float) -> str:
    """Three digits of so many milliseconds, and all that stand before the point."""
    taken = seconds * 1e3
    return f"{taken:,.0f}" if taken >= 99.95 else f"{taken:#.3g}"


def native_kernels() -> str:
    """Whether there are native kernels for the CPU here, as a sentence."""
    backend = kpt_core.backends().get("cpu")
    if backend is None:
        return "kpt-backend-cpu is not installed: KPT runs in plain PyTorch"
    reason = backend.unavailable()
    return "kpt-backend-cpu serves" if reason is None else f"KPT runs in plain PyTorch: {reason}"


def _times(result: Result) -> str:
    doubtful = result.noise is not None and abs(result.gain - 1) < 2 * result.noise
    return f"{result.implementation} {'~' if doubtful else ''}{result.gain:.2f}x{'' if result.rounds > 1 else '*'}"
