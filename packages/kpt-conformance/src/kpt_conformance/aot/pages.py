"""The matrix as a page of documentation: what each kernel takes of each chip."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from .chips import CHIPS, KIB
from .row import Row

_HEAD = """# Kernels: registers, shared memory and occupancy

Made by `python -m kpt_conformance.aot --table FILE` from the compile matrix (see [aot.md](aot.md)), with {versions};
not edited by hand.

"204 r, 144 KiB, 8/64" is 204 registers of a thread, 144 KiB of shared memory (LDS) of a block, and 8 of the 64 warps
(waves) that a multiprocessor can hold. Spills are told where there are any. "-" is a chip for which there is no such
configuration, "not offered" one for which the program is not meant, "unsupported" one that can't have it.
"""


def page(rows: Sequence[Row]) -> str:
    """Markdown: a section for each kernel, in it a line for each program and configuration, a column for each chip.

    It depends on the rows alone, so it is the same whenever the same is compiled.
    """
    used = {name: version for row in rows for name, version in row.versions.items()}
    versions = ", ".join(f"{name} {used[name]}" for name in sorted(used)) or "no compiler"
    lines = [_HEAD.format(versions=versions)]
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
        found = {row.chip: _cell(row) for row in rows if row.configuration == configuration}
        cells = (found.get(chip) or without.get(chip) or "-" for chip in chips)
        yield f"| {program} | {configuration} | {' | '.join(cells)} |"


def _cell(row: Row) -> str:
    if row.status not in ("ok", "broken") or row.occupancy is None:
        return row.status
    parts = [f"{row.registers} r"]
    if row.shared_memory:
        parts.append(f"{-(-row.shared_memory // KIB)} KiB")
    parts.append(f"{row.occupancy}/{CHIPS[row.chip].unit_warps}")
    if row.spills:
        parts.append(f"{row.spills} B of spills")
    return ", ".join(parts)
