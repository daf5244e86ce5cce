"""The matrix as text, and as a page of documentation."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from .chips import CHIPS, KIB
from .readings import Row, families_in

_HEAD = ("kernel", "program", "chip", "configuration", "status", "registers", "spills", "memory", "warps", "code")
_PAGE_HEAD = """# Kernels: registers, shared memory and occupancy

Made by `python -m kpt_conformance.aot --table FILE` from the compile matrix (see [aot.md](aot.md)), with {versions};
not edited by hand.

"204 r, 144 KiB, 8/64" is 204 registers of a thread, 144 KiB of shared memory (LDS) of a block, and 8 of the 64 warps
(waves) that a multiprocessor can hold. Spills are told where there are any. "-" is a chip for which there is no such
configuration, "not offered" one for which the program is not meant, "unsupported" one that can't have it.
"""


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row, then what is wrong in full, then a summary."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *_remarks(rows), "", summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """Return how many there are of each status."""
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


def page(rows: Sequence[Row]) -> str:
    """Return Markdown: a section for each kernel, with a line for each configuration and a column for each chip.

    It depends on the rows alone, so it is the same whenever the same is compiled.
    """
    used = {name: version for row in rows for name, version in row.versions.items()}
    versions = ", ".join(f"{name} {used[name]}" for name in sorted(used)) or "no compiler"
    lines = [_PAGE_HEAD.format(versions=versions)]
    for (backend, kernel), group in groupby(rows, lambda row: (row.backend, row.kernel)):
        of_kernel = list(group)
        chips = list(dict.fromkeys(row.chip for row in of_kernel if row.chip))
        lines += [
            f"## `{of_kernel[0].op}`",
            "",
            f"`{kernel}` of {backend}.",
            "",
            f"| program | configuration | {' | '.join(chips)} |",
            "|---" * (len(chips) + 2) + "|",
        ]
        for program, of_program in groupby(of_kernel, lambda row: row.program):
            lines += _lines(program, list(of_program), chips)
        lines.append("")
    return "\n".join(lines)


def _lines(program: str, rows: Sequence[Row], chips: Sequence[str]) -> Iterator[str]:
    # A chip that is without the program as a whole says so in each of its lines.
    without = {row.chip: row.status for row in rows if not row.configuration}
    for configuration in dict.fromkeys(row.configuration for row in rows if row.configuration) or ("",):
        found = {row.chip: _page_cell(row) for row in rows if row.configuration == configuration}
        cells = (found.get(chip) or without.get(chip) or "-" for chip in chips)
        yield f"| {program} | {configuration} | {' | '.join(cells)} |"


def _page_cell(row: Row) -> str:
    if row.status not in ("ok", "broken") or row.occupancy is None:
        return row.status
    parts = [f"{row.registers} r"]
    if row.shared_memory:
        parts.append(f"{-(-row.shared_memory // KIB)} KiB")
    parts.append(f"{row.occupancy}/{CHIPS[row.chip].unit_warps}")
    if row.spills:
        parts.append(f"{row.spills} B of spills")
    return ", ".join(parts)
