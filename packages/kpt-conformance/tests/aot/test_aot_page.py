"""The matrix as a page: a line for each program and configuration, a column for each chip."""

from kpt_conformance.aot import Row
from kpt_conformance.aot.tables import page


def row(program: str, chip: str, configuration: str, status: str = "ok", **numbers: object) -> Row:
    row = {"registers": 200, "shared_memory": 147457, "spills": 0, "occupancy": 8} if status == "ok" else {}
    return Row(
        backend="sample",
        op="aot.matmul",
        kernel="sample:matmul",
        program=program,
        chip=chip,
        configuration=configuration,
        status=status,
        versions={} if status == "not offered" else {"triton": "3.9.0"},
        **{**row, **numbers},
    )


ROWS = (
    row("plain", "sm80", "small"),
    row("plain", "sm90", "small", registers=96, shared_memory=0, occupancy=40),
    row("plain", "sm90", "large", "broken", registers=255, shared_memory=1024, spills=8, occupancy=8),
    row("plain", "sm86", "small", occupancy=48),
    row("descriptors", "sm80", "", "not offered"),
    row("descriptors", "sm90", "large", "unsupported"),
    row("descriptors", "sm86", "", "not offered"),
)


def test_cells_tell_what_was_read():
    lines = [line for line in page(ROWS).splitlines() if line.startswith("|")]
    assert lines == [
        "| program | configuration | sm80 | sm90 | sm86 |",
        "|---|---|---|---|---|",
        "| plain | small | 200 r, 145 KiB, 8/64 | 96 r, 40/64 | 200 r, 145 KiB, 48/48 |",
        "| plain | large | - | 255 r, 1 KiB, 8/64, 8 B of spills | - |",
        "| descriptors | large | not offered | unsupported | not offered |",
    ]


def test_program_that_no_chip_is_offered_has_a_line():
    assert "| descriptors |  | not offered |" in page([row("descriptors", "sm80", "", "not offered")])


def test_kernels_are_sections_and_versions_are_told():
    written = page(ROWS)
    assert "## `aot.matmul`\n\n`sample:matmul` of sample.\n" in written
    assert "with triton 3.9.0;" in written
