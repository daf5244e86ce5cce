"""The support table says what the records prove, and the check finds every way in which it may not."""

import re
from dataclasses import replace as replaced_of

import pytest
from evidence_package import replaced

from kpt_conformance.evidence import faults, save
from kpt_conformance.evidence.__main__ import main
from kpt_core.evidence import Level, load


@pytest.fixture
def command(place, backend):
    """Run `python -m kpt_conformance.evidence` here."""
    files = ("--support", str(place.support), "--ratchet", str(place.ratchet))
    return lambda *arguments: main([*arguments, *files])


def cells(document: str, kernel: str) -> dict[str, str]:
    """The words of a kernel, by chip."""
    found = {}
    tables = document.partition("## What each kernel needs")[0].split("\n\n")
    for table in tables:
        lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
        for line in lines[1:]:
            if line[1] == f"`{kernel}`" or line[1] == kernel:
                found |= dict(zip(lines[0][2:], line[2:], strict=True))
    return found


def test_without_records_everything_is_claimed(command, place):
    assert command("write") == 0
    document = place.support.read_text()
    assert cells(document, "evidence_pkg.fast:fast") == {"any chip": "claimed"}
    needs = "cpu, bf16, bfloat16 or float32 | deterministic |"
    assert f"| evidence.double | `evidence_pkg.fast:fast` | evident | {needs}" in document.splitlines()
    assert "forward only" in document


def test_each_cell_is_a_word_that_leads_to_its_record(prove, command, place, folder):
    file = prove()
    (ran,) = load(folder)[0]
    known = {name: getattr(ran, name) for name in ("op", "kernel", "backend", "hashes", "ran_with")}
    for number in range(20):
        save(folder, replaced(**known, chip=f"chip {number:02}", level=Level.COMPILED))
    command("write")
    found = cells(place.support.read_text(), "evidence_pkg.fast:fast")
    assert len(found) == 21
    name, _, features = ran.chip.partition(" (")
    word, number, label = re.fullmatch(r"\[(\w+)\]\[(\d+)\] \((.+)", found[name]).groups()
    assert (word, label) == ("ran", features)
    (link,) = re.findall(rf"^\[{number}\]: (.+)$", place.support.read_text(), re.MULTILINE)
    assert (place.support.parent / link).resolve() == file
    assert f"- evident: ran on {name}; compiled on chip 00, chip 01" in place.support.read_text()
    heads = [line for line in place.support.read_text().splitlines() if line.startswith("| op | kernel | chip")]
    assert max(line.count("|") - 1 for line in heads) <= 10


def test_instruction_sets_of_one_cpu_share_a_cell_and_an_earlier_suite_is_said(prove, command, place, folder):
    file = prove()
    (ran,) = load(folder)[0]
    file.unlink()
    save(folder, replaced_of(ran, chip="Some CPU (avx2)"))
    save(folder, replaced_of(ran, chip="Some CPU (amx_bf16)", hashes=ran.hashes | {"suite": "0" * 64}))
    command("write")
    (cell,) = cells(place.support.read_text(), "evidence_pkg.fast:fast").values()
    assert re.sub(r"\[\d+\]", "", cell) == "[ran, earlier suite] (amx_bf16), [ran] (avx2)"


def test_what_was_written_is_right(prove, command, capsys):
    prove()
    assert command("write") == 0
    assert command("check") == 0, capsys.readouterr().out
    assert "says what the records prove" in capsys.readouterr().out


def test_a_table_that_is_not_there_is_a_fault(command, place, capsys):
    command("write")
    place.support.unlink()
    assert command("check") == 1
    assert "write --support" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("| claimed |", "| [ran][99] |", r"\[99\].*which no record proves"),
        ("[ran]", "[compiled]", "lacks .*ran.*which the records prove"),
        ("| deterministic |", "| |", "lacks .*deterministic.*which the records prove"),
    ],
)
def test_a_table_that_claims_something_else_is_a_fault(prove, command, place, before, after, fault):
    prove()
    command("write")
    text = place.support.read_text()
    assert before in text
    place.support.write_text(text.replace(before, after))
    found = faults(place)
    assert any(re.search(fault, sentence) for sentence in found), found
    assert all("`python -m kpt_conformance.evidence write" in sentence for sentence in found)


def test_a_change_in_a_module_that_the_kernel_imports_makes_its_record_stale(prove, package, command, place, commit):
    file = prove()
    prove("reference")
    command("write")
    (package / "inner" / "deeper.py").write_text("def twice(x): return 3 * x\n")
    stale = faults(place)[0]
    assert f"{file} is stale: the kernel changed after evidence_pkg.fast:fast of evidence.double ran on" in stale
    assert "nox -s evidence" in stale
    command("write")
    document = place.support.read_text()
    assert all(cell.startswith(("[stale]", "claimed")) for cell in cells(document, "evidence_pkg.fast:fast").values())
    assert "[stale]" not in str(cells(document, "reference"))
    assert faults(place), "stale still, though the table says so"


@pytest.mark.parametrize("changed", ["double.py", "cases.py", "deep.py"])
def test_a_change_of_the_op_or_its_cases_makes_all_its_records_stale(prove, package, command, place, changed, commit):
    prove()
    command("write")
    assert not faults(place)
    with (package / changed).open("a") as file:
        file.write("# another\n")
    commit()
    assert any("is stale: its op or the op's cases changed" in fault for fault in faults(place))


def test_pruning_removes_what_proves_nothing(prove, folder, package, command, place, capsys):
    stale, good = prove(), prove("reference")
    command("write")
    orphan = save(folder, replaced(op="moe.experts", kernel="gone.away:kernel", backend="gone"))
    (package / "fast.py").write_text("def fast(x): return x\n")
    told = "\n".join(faults(place))
    assert f"{orphan}: no backend gone in this package offers gone.away:kernel of moe.experts" in told
    capsys.readouterr()
    assert command("write", "--prune") == 0
    assert capsys.readouterr().out.splitlines()[:2] == [f"removed {file}" for file in sorted([stale, orphan])]
    assert good.exists()
    assert all("was ran on" in fault for fault in faults(place)), "the ratchet holds"
    assert command("write", "--lower", "the kernel was rewritten") == 0
    assert faults(place) == []


def test_a_corrupt_file_stops_the_table_and_is_named(prove, command, place, capsys):
    file = prove()
    command("write")
    before = place.support.read_text()
    file.write_text("{")
    assert any("is not JSON" in sentence for sentence in faults(place))
    assert command("write", "--prune") == 1
    assert "is not JSON" in capsys.readouterr().err
    assert place.support.read_text() == before


def test_a_source_that_can_not_be_read_is_a_fault(prove, package, command, place):
    prove()
    command("write")
    (package / "fast.py").unlink()
    assert any("'evidence_pkg.fast'" in sentence for sentence in faults(place))


def test_records_made_elsewhere_are_taken_in_with_the_commit_of_their_files(prove, command, tmp_path, folder, git):
    elsewhere = tmp_path / "elsewhere"
    prove(folder=elsewhere)
    (file,) = elsewhere.rglob("*.json")
    text = file.read_text()
    commit = load(file.parent)[0][0].commit
    file.write_text(text.replace(f'"{commit}"', "null"))
    assert command("write", "--take", str(elsewhere)) == 0
    assert [record.commit for record in load(folder)[0]] == [commit]
    assert command("check") == 0


def test_records_of_other_files_are_not_taken(prove, command, tmp_path, package, capsys):
    prove(folder=tmp_path / "elsewhere")
    (package / "fast.py").write_text("def fast(x): return x\n")
    assert command("write", "--take", str(tmp_path / "elsewhere")) == 1
    assert "the kernel is another here; check out what was run" in capsys.readouterr().err
