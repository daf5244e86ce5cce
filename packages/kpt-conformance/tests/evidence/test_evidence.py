"""Records: what is written, what is refused when read, when they are replaced, when they are stale."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evidence_package import RECORD, replaced

from kpt_conformance.aot.row import Row, Status
from kpt_conformance.evidence import (
    EvidenceError,
    Level,
    load,
    record_compiled,
    record_success,
    registered,
    save,
)
from kpt_conformance.evidence.provenance import chip_name
from kpt_conformance.evidence.record import loads
from kpt_conformance.evidence.sources import sources_of
from kpt_core import UnknownNameError


def test_levels_are_a_ladder():
    assert sorted(Level) == [Level.CLAIMED, Level.COMPILED, Level.INTERPRETED, Level.RAN]


def test_a_record_survives_its_file(folder):
    file = save(folder, RECORD)
    assert file == folder / "acme" / "moe.experts--somewhere.moe-experts--chip-9-fast.json"
    assert load(folder) == ([RECORD], [])
    assert list(folder.rglob(".*")) == []


WRONG = {
    "format": "kpt-evidence-0",
    "op": "experts",
    "kernel": "",
    "backend": None,
    "chip": "two\nlines",
    "level": "claimed",
    "source": "abc",
    "versions": {},
    "date": "2026-11-31T00:00:00Z",
    "commit": "a commit",
    "checks": True,
    "expected_failures": -1,
    "details": [],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_named_with_its_file(field):
    document = json.loads(RECORD.dumps())
    assert set(WRONG) == set(document)
    document[field] = WRONG[field]
    with pytest.raises(EvidenceError, match=rf"^somewhere/x\.json: {field} is .*; expected "):
        loads(json.dumps(document), "somewhere/x.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RECORD.dumps()[:-20], "is not JSON"),
        ("", "is not JSON"),
        ("[]", "expected an object, got list"),
        ('{"loss": 1.5}', "lacks backend, checks.* and also has loss"),
        (RECORD.dumps().replace('"chip"', '"ship"'), "it lacks chip and also has ship"),
        (RECORD.dumps().replace('"acme"', '"other"'), "belongs to .*other/"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_corrupt_or_foreign_file_is_a_fault_that_names_it(folder, text, reason):
    file = save(folder, RECORD)
    save(folder, replaced(chip="other"))
    file.write_text(text, errors="surrogateescape")
    records, (fault,) = load(folder)
    assert [record.chip for record in records] == ["other"]
    assert str(file) in fault
    with pytest.raises(EvidenceError, match=reason):
        save(folder, RECORD)


def test_a_file_that_is_no_json_is_a_fault_too(folder):
    save(folder, RECORD)
    (folder / "acme" / "notes.txt").write_text("it ran")
    assert len(load(folder)[1]) == 1


def test_a_higher_level_of_the_same_source_stays(folder):
    save(folder, replaced(level=Level.INTERPRETED))
    save(folder, replaced(level=Level.COMPILED))
    assert load(folder)[0][0].level is Level.INTERPRETED
    save(folder, RECORD)
    assert load(folder)[0] == [RECORD]
    changed = replaced(level=Level.COMPILED, source="f" * 64)
    save(folder, changed)
    assert load(folder)[0] == [changed]


def test_a_newer_record_of_the_same_level_takes_the_place(folder):
    save(folder, RECORD)
    save(folder, replaced(checks=500))
    assert [record.checks for record in load(folder)[0]] == [500]


def test_registered_kernels_and_references_are_claims(backend):
    fast, interpreted, reference = [claim for claim in registered() if claim.op == "evidence.double"]
    assert fast.modules == ("evidence_pkg.fast", "evidence_pkg.back", "evidence_pkg.refusal")
    assert (fast.needs, fast.promises) == ("cpu, bf16, bfloat16 or float32", "deterministic")
    assert interpreted.promises == "forward only"
    assert reference.key == ("reference", "evidence.double", "reference")
    assert "moe.experts" in {claim.op for claim in registered()}


def test_sources_are_followed_through_the_package_and_nothing_else(package):
    sources = sources_of(["evidence_pkg.fast", "evidence_pkg.refusal"])
    assert sorted(sources.files) == ["evidence_pkg.fast", "evidence_pkg.inner.deeper", "evidence_pkg.refusal"]
    assert sources.third_parties == {"torch", "kpt_core"}


def test_sources_of_a_name_from_a_package_are_all_that_the_package_imports(package):
    (package / "fast.py").write_text("import evidence_pkg\nfrom evidence_pkg import nothing\n")
    assert sorted(sources_of(["evidence_pkg.fast"]).files) == [
        "evidence_pkg",
        "evidence_pkg.everything",
        "evidence_pkg.fast",
    ]


def test_sources_that_are_no_python_count_where_a_module_names_them(package):
    (package / "kernels").mkdir()
    (package / "kernels" / "digests.txt").write_text("one")
    with (package / "deep.py").open("a") as file:
        file.write('\nKERNEL_SOURCES = ("kernels/digests.txt",)\n')
    sources = sources_of(["evidence_pkg.deep"])
    assert sorted(sources.files) == ["evidence_pkg.deep", "evidence_pkg.deep:kernels/digests.txt"]
    before = sources.hash
    (package / "kernels" / "digests.txt").write_text("two")
    assert sources_of(["evidence_pkg.deep"]).hash != before
    (package / "kernels" / "digests.txt").unlink()
    with pytest.raises(EvidenceError, match=r"digests\.txt, which is not there; install the package again"):
        sources_of(["evidence_pkg.deep"])


@pytest.mark.parametrize("written", ['tuple[str, ...] = ("digests.txt",)', '= ("digests.txt",)'])
def test_sources_that_are_no_python_may_be_annotated(package, written):
    (package / "digests.txt").write_text("one")
    (package / "deep.py").write_text(f"KERNEL_SOURCES{': ' if '[' in written else ' '}{written}\n")
    assert "evidence_pkg.deep:digests.txt" in sources_of(["evidence_pkg.deep"]).files


@pytest.mark.parametrize("written", ['["a"]', '"a"', "1", "(1,)", "()", "tuple(names)"])
def test_sources_that_are_named_otherwise_are_an_error(package, written):
    (package / "deep.py").write_text(f"KERNEL_SOURCES = {written}\n")
    with pytest.raises(EvidenceError, match="a tuple of paths in quotes was expected; got KERNEL_SOURCES = "):
        sources_of(["evidence_pkg.deep"])


def test_nothing_is_imported_to_find_sources(package):
    (package / "fast.py").write_text("raise AssertionError\nfrom . import deep\n")
    assert set(sources_of(["evidence_pkg.fast"]).files) == {"evidence_pkg.fast", "evidence_pkg.deep"}


def test_the_hash_is_of_contents_alone(package, tmp_path, monkeypatch):
    before = sources_of(["evidence_pkg.fast"]).hash
    file = package / "inner" / "deeper.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    moved = package.parent.rename(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(moved)
    del sys.modules["evidence_pkg"]  # it knows its old place
    assert sources_of(["evidence_pkg.fast"]).files["evidence_pkg.fast"].is_relative_to(moved)
    assert sources_of(["evidence_pkg.fast"]).hash == before


@pytest.mark.parametrize("changed", ["fast.py", "back.py", "refusal.py", "inner/deeper.py"])
def test_a_change_of_what_the_kernel_is_made_of_changes_the_hash(backend, package, changed):
    claim = next(claim for claim in registered() if claim.kernel == "evidence_pkg.fast:fast")
    before = claim.sources().hash
    (package / "everything.py").write_text("nothing = 0\n")
    assert claim.sources().hash == before
    with (package / changed).open("a") as file:
        file.write("# changed\n")
    assert claim.sources().hash != before


def test_a_source_that_is_not_there_or_no_python_is_named(package):
    with pytest.raises(EvidenceError, match=r"'evidence_pkg\.missing'"):
        sources_of(["evidence_pkg.missing"])
    (package / "fast.py").write_text("def")
    with pytest.raises(EvidenceError, match=r"fast\.py can't be read as Python"):
        sources_of(["evidence_pkg.fast"])


def test_a_success_is_recorded(prove, folder, package):
    file = prove(expected_failures=2)
    ((record,), faults) = load(folder)
    assert faults == []
    assert folder / record.place == file
    assert (record.op, record.kernel, record.backend) == ("evidence.double", "evidence_pkg.fast:fast", "evident")
    assert (record.level, record.checks, record.expected_failures) == (Level.RAN, 412, 2)
    assert record.chip == chip_name(torch.device("cpu"))
    assert record.source == sources_of(["evidence_pkg.fast", "evidence_pkg.back", "evidence_pkg.refusal"]).hash
    assert record.versions["torch"] == torch.__version__
    assert {"python", "kpt-core", "kpt-conformance"} <= set(record.versions)
    assert record.commit is None


def test_the_reference_is_recorded(prove, folder):
    assert prove("reference").parent.name == "reference"
    assert load(folder)[0][0].source == sources_of(["evidence_pkg.double"]).hash


def test_the_interpreter_counts_for_triton_kernels_alone(prove, folder, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prove("evidence_pkg.interpreted:interpreted")
    prove("evidence_pkg.fast:fast")
    by_kernel = {record.kernel.partition(":")[2]: record for record in load(folder)[0]}
    assert by_kernel["interpreted"].level is Level.INTERPRETED
    assert by_kernel["interpreted"].chip == "Triton's interpreter"
    assert by_kernel["fast"].level is Level.RAN


def test_what_is_not_registered_is_not_recorded(prove, folder):
    with pytest.raises(UnknownNameError, match=r"did you mean 'evidence_pkg\.fast:fast'"):
        prove("evidence_pkg.fast:fats")
    assert not folder.exists()


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_kernel(prove, folder, package):
    def commit() -> str | None:
        prove()
        return load(folder)[0][0].commit

    git(package, "init", "--quiet")
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "all")
    head = git(package, "rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (package / "everything.py").write_text("nothing = 0\n")
    assert commit() == head, "the kernel is not made of this file"
    (package / "inner" / "deeper.py").write_text("def twice(x): return 2 * x\n")
    assert commit() == f"{head}+changes"
    (package / ".gitignore").write_text("*\n")
    git(package, "rm", "--cached", "--quiet", "-r", ".")
    assert commit() is None, "installed in a folder that git ignores"


def row(chip: str = "sm90", status: Status = "ok", registers: int = 100) -> Row:
    return Row(
        backend="evident",
        op="evidence.double",
        kernel="evidence_pkg.fast:fast",
        chip=chip,
        status=status,
        contract="wgmma",
        registers=registers,
        spills=0,
        shared_memory=1024,
        versions={"ptxas": "13.0"},
    )


def test_compiled_only_if_no_configuration_is_broken(backend, folder):
    rows = [row(), row("sm80"), row(registers=168), row("sm80", "broken")]
    (file,) = record_compiled(folder, rows)
    ((record,), _) = load(folder)
    assert folder / record.place == file
    assert (record.chip, record.level, record.checks) == ("sm90", Level.COMPILED, 2)
    assert record.details == {"registers": 168, "spills": 0, "shared_memory": 1024, "contract": "wgmma"}
    assert record.versions["ptxas"] == "13.0"
    assert record_compiled(folder, [row(), row("", "error")]) == []


def test_what_a_chip_does_not_offer_takes_nothing_from_what_it_does(backend, folder):
    rows = [row(), row(status="unsupported", registers=255), row("sm80", "not offered")]
    record_compiled(folder, rows)
    ((record,), _) = load(folder)
    assert (record.chip, record.checks, record.details["registers"]) == ("sm90", 1, 100)


def test_what_ran_elsewhere_says_nothing_of_another_chip(prove, backend, folder):
    prove()
    record_compiled(folder, [row()])
    assert {record.chip: record.level for record in load(folder)[0]} == {
        chip_name(torch.device("cpu")): Level.RAN,
        "sm90": Level.COMPILED,
    }


def test_chip_names_are_words():
    name = chip_name(torch.device("cpu"))
    assert name == " ".join(name.split())
    assert torch.backends.cpu.get_cpu_capability().lower() in name


def test_every_reference_here_can_be_recorded(folder):
    for claim in registered():
        where = {"op": claim.op, "kernel": claim.kernel, "backend": claim.backend}
        record_success(folder, device=torch.device("cpu"), checks=1, **where)
    assert len(load(folder)[0]) == len(registered()) > 0
