"""The matrix as text."""

from collections import Counter
from collections.abc import Iterator, Sequence

from .chips import CHIPS, KIB
from .instructions import families_in
from .row import Row

_HEAD = ("kernel", "program", "chip", "configuration", "status", "registers", "spills", "memory", "warps", "code")


def table(rows: Sequence[Row]) -> str:
    """A line for each row, then what is wrong in full, then a summary."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *_remarks(rows), "", summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """How many of each status."""
    numbers = Counter(row.status for row in rows)
    return ", ".join(f"{number} {status}" for status, number in sorted(numbers.items()))


def _cells(row: Row) -> tuple[str, ...]:
    instructions = families_in(CHIPS[row.chip].vendor, row.instructions) if row.instructions else ()
    return (
        row.kernel.rpartition(":")[2],
        row.program,
        row.chip,
        row.configuration,
        row.status,
        _number(row.registers),
        _number(row.spills),
        "" if row.shared_memory is None else f"{row.shared_memory / KIB:.1f} KiB",
        _number(row.occupancy),
        ", ".join(f"{name} {number}" for name, number in instructions),
    )


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.detail and row.status != "ok":
            where = " ".join(filter(None, (row.kernel, row.program, row.chip, row.configuration)))
            yield f"\n{row.status}: {where}\n    {row.detail}"
            if row.contract is not None and not row.good:
                yield f"    contract: {row.contract}"
