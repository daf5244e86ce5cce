"""The support table says what the records prove, and the check finds every way in which it may not."""

import re

import pytest
from evidence_package import replaced

from kpt_conformance.evidence import Level, faults, load, registered, save, table
from kpt_conformance.evidence.__main__ import main


@pytest.fixture
def support(tmp_path):
    return tmp_path / "support.md"


@pytest.fixture
def command(folder, support):
    """Run `python -m kpt_conformance.evidence` here."""
    return lambda *arguments: main([*arguments, "--evidence", str(folder), "--support", str(support)])


def rows(document: str) -> dict[str, str]:
    """The evidence of each kernel of the op `evidence.double`."""
    section = document.partition("## evidence.double\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {line[0]: line[3] for line in cells[1:]}


def test_without_records_everything_is_claimed(backend, folder):
    document = table(registered(), [])
    kernels = ["`evidence_pkg.fast:fast`", "`evidence_pkg.interpreted:interpreted`", "reference"]
    assert rows(document) == dict.fromkeys(kernels, "claimed")
    fast = "| `evidence_pkg.fast:fast` | evident | cpu, bf16, bfloat16 or float32; deterministic | claimed |"
    assert fast in document.splitlines()
    assert "cpu; forward only" in document
    assert "## moe.experts" in document


def test_each_chip_has_its_evidence_the_best_first(prove, backend, folder):
    prove(expected_failures=1)
    (ran,) = load(folder)[0]
    details = {"contract": "wgmma", "registers": 168, "spills": 0, "shared_memory": 232448}
    known = {"op": ran.op, "kernel": ran.kernel, "backend": ran.backend, "source": ran.source}
    save(folder, replaced(**known, chip="sm90", level=Level.COMPILED, details=details, checks=12))
    save(folder, replaced(**known, chip="gfx942", level=Level.COMPILED, details={"spills": 8}, checks=1))
    day = ran.date[:10]
    assert rows(table(registered(), load(folder)[0]))["`evidence_pkg.fast:fast`"].split("<br>") == [
        f"ran on {ran.chip}, {day}, 412 checks, 1 expected to fail",
        "compiled for gfx942 (8 bytes spilled), 2026-11-21",
        "compiled for sm90 (12 configurations, wgmma, 168 registers, no spills, 227 KiB shared memory), 2026-11-21",
    ]


def test_what_was_written_is_right(prove, command, capsys):
    prove()
    assert command("write") == 0
    assert command("check") == 0
    assert "says what the records" in capsys.readouterr().out


def test_a_table_that_is_not_there_is_a_fault(backend, command, capsys):
    assert command("check") == 1
    assert "write --evidence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("| claimed |", "| ran on NVIDIA H200, 2026-11-21, 412 checks |", "NVIDIA H200.*which no record proves"),
        ("412 checks", "413 checks", "413 checks.*which no record proves"),
        ("cpu, bf16", "cpu", "which no record proves"),
        ("; deterministic", "", "lacks .*deterministic.*which the records prove"),
    ],
)
def test_a_table_that_claims_something_else_is_a_fault(prove, folder, command, support, before, after, fault):
    prove()
    command("write")
    text = support.read_text()
    assert before in text
    support.write_text(text.replace(before, after))
    found = faults(folder, support)
    assert any(re.search(fault, sentence) for sentence in found), found
    assert all("`python -m kpt_conformance.evidence write" in sentence for sentence in found)


def test_a_row_of_another_op_is_no_proof(prove, folder, command, support):
    prove("reference")
    command("write")
    lines = support.read_text().splitlines()
    (proven,) = [line for line in lines if line.startswith("| reference") and "412 checks" in line]
    here = lines.index("## moe.experts")
    there = next(number for number in range(here, len(lines)) if lines[number].startswith("| reference"))
    lines[there] = proven
    support.write_text("\n".join(lines) + "\n")
    assert any("under 'moe.experts', which no record proves" in sentence for sentence in faults(folder, support))


def test_a_table_that_claims_less_is_a_fault(prove, folder, command, support):
    command("write")
    prove()
    assert any("lacks" in sentence and "412 checks" in sentence for sentence in faults(folder, support))


def test_a_change_in_a_module_that_the_kernel_imports_makes_its_record_stale(prove, folder, package, command, support):
    file = prove()
    prove("reference")
    command("write")
    (package / "inner" / "deeper.py").write_text("def twice(x): return 3 * x\n")
    stale, *rest = faults(folder, support)
    assert f"{file} is stale: evidence_pkg.fast:fast of evidence.double changed after it ran on" in stale
    assert "nox -s evidence" in stale
    assert "--prune" in stale
    assert any("which no record proves" in sentence for sentence in rest)
    command("write")
    found = rows(support.read_text())
    assert found["`evidence_pkg.fast:fast`"].startswith("claimed<br>stale: ran on")
    assert "stale" not in found["reference"]
    assert len(faults(folder, support)) == 1, "stale still, though the table says so"


def test_pruning_removes_what_proves_nothing(prove, folder, package, command, support, capsys):
    stale, good = prove(), prove("reference")
    orphan = save(folder, replaced(op="moe.experts", kernel="gone.away:kernel", backend="gone"))
    (package / "fast.py").write_text("def fast(x): return x\n")
    assert f"{orphan}: no backend gone offers gone.away:kernel of moe.experts" in "\n".join(faults(folder, support))
    capsys.readouterr()
    assert command("write", "--prune") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [f"removed {file}" for file in sorted([stale, orphan])]
    assert good.exists()
    assert faults(folder, support) == []


def test_a_corrupt_file_stops_the_table_and_is_named(prove, folder, command, support, capsys):
    command("write")
    before = support.read_text()
    prove().write_text("{")
    assert any("is not JSON" in sentence for sentence in faults(folder, support))
    assert command("write", "--prune") == 1
    assert "is not JSON" in capsys.readouterr().err
    assert support.read_text() == before


def test_a_source_that_can_not_be_read_is_a_fault(prove, folder, package, command, support):
    prove()
    command("write")
    (package / "fast.py").unlink()
    assert any("'evidence_pkg.fast'" in sentence for sentence in faults(folder, support))
