"""What is recorded of a run and of a compile matrix, and what is not."""

import hashlib
import json

import pytest
import torch

from kpt_conformance.aot.row import Row, Status
from kpt_conformance.evidence import record_compiled, registered
from kpt_conformance.evidence.provenance import chip_name, is_cpu
from kpt_core import KptError, UnknownNameError
from kpt_core.evidence import EvidenceError, Level, load, sources_of


def test_registered_kernels_and_references_are_claims(backend):
    fast, interpreted, reference = [claim for claim in registered() if claim.op == "evidence.double"]
    assert fast.modules == ("evidence_pkg.fast", "evidence_pkg.back", "evidence_pkg.refusal")
    assert {fast.package, interpreted.package, reference.package} == {"evidence_pkg"}
    assert reference.key == ("reference", "evidence.double", "reference")
    assert "moe.experts" in {claim.op for claim in registered()}


def test_a_success_is_recorded_in_the_package(prove, folder, package, commit):
    absent = ({"check": "vmapped", "dtypes": ["float32"], "refused": 3, "skipped": 0, "reason": "refused: vmap"},)
    file = prove(passed=7, refused=3, skipped=1, absent=absent, tiles=frozenset({"b 64", "a 32"}))
    ((record,), faults) = load(folder)
    assert faults == []
    assert folder / record.place == file
    assert record.key == ("evident", "evidence.double", "evidence_pkg.fast:fast")
    assert (record.level, record.passed, record.total, record.absent) == (Level.RAN, 7, 11, absent)
    assert record.outcomes == "p" * 7 + "r" * 3 + "s"
    assert (record.chip, record.device) == (chip_name(torch.device("cpu")), "cpu")
    modules = ["evidence_pkg.fast", "evidence_pkg.back", "evidence_pkg.refusal"]
    assert record.hashes["kernel"] == sources_of(modules).hash
    assert record.hashes["contract"] == sources_of(["evidence_pkg.double", "evidence_pkg.cases"]).hash
    assert record.ran_with == {"torch": torch.__version__.partition("+")[0], "tiles": "a 32; b 64"}
    assert record.versions["torch"] == torch.__version__
    assert {"python", "kpt-core", "kpt-conformance"} <= set(record.versions)
    assert record.commit is not None


def test_a_folder_holds_one_for_each_package(prove, tmp_path):
    file = prove(folder=tmp_path / "elsewhere")
    assert file.parent == tmp_path / "elsewhere" / "evidence_pkg"


def test_the_reference_is_recorded(prove, folder):
    prove("reference")
    assert load(folder)[0][0].hashes["kernel"] == sources_of(["evidence_pkg.double"]).hash


def test_the_instruction_set_that_ran_is_the_chip_s(prove, folder, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1"}))
    prove()
    (record,) = load(folder)[0]
    assert record.chip.endswith(" (baseline)")
    assert record.ran_with == {"isa": "baseline", "sources": "1"}


def test_nothing_is_recorded_of_a_library_that_is_not_what_was_built(prove, folder, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "junk": True}))
    with pytest.raises(KptError, match="not the bytes that its build wrote down"):
        prove()
    assert not folder.exists()


def test_nothing_is_recorded_of_files_that_are_not_committed(prove, folder, package, commit):
    head = prove()
    before = load(folder)[0][0].commit
    (package / "everything.py").write_text("nothing = 0\n")
    prove(committing=False)
    assert load(folder)[0][0].commit == before, "the kernel is not made of this file"
    (package / "inner" / "deeper.py").write_text("def twice(x): return 2 * x\n")
    head.unlink()
    with pytest.raises(EvidenceError, match=r"evidence_pkg\.inner\.deeper, which commit .* commit first"):
        prove(committing=False)
    assert not head.exists()
    prove()
    assert load(folder)[0][0].commit not in (None, before)


def test_native_sources_are_known_by_their_digests(prove, folder, package, git):
    (package.parent / "native").mkdir()
    (package.parent / "native" / "part.cpp").write_text("int part;\n")
    sha = hashlib.sha256(b"int part;\n").hexdigest()
    (package / "built").mkdir()
    (package / "built" / "sources.txt").write_text(f"part.cpp {sha}\n")
    (package.parent / ".gitignore").write_text("built/\n")
    with (package / "fast.py").open("a") as file:
        file.write('\nKERNEL_SOURCES = ("built/sources.txt",)\n')
    prove()
    assert load(folder)[0][0].commit is not None
    (package / "built" / "sources.txt").write_text(f"part.cpp {'0' * 64}\n")
    with pytest.raises(EvidenceError, match=r"made of part\.cpp, which commit"):
        prove()


def test_no_commit_is_named_where_there_is_no_git(prove, folder):
    prove(committing=False)
    assert load(folder)[0][0].commit is None


def test_the_interpreter_counts_for_triton_kernels_alone(prove, folder, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prove("evidence_pkg.interpreted:interpreted")
    prove("evidence_pkg.fast:fast")
    by_kernel = {record.kernel.partition(":")[2]: record for record in load(folder)[0]}
    assert by_kernel["interpreted"].level is Level.INTERPRETED
    assert by_kernel["interpreted"].chip == "Triton's interpreter"
    assert "triton" in by_kernel["interpreted"].ran_with
    assert by_kernel["fast"].level is Level.RAN


def test_what_is_not_registered_is_not_recorded(prove, folder):
    with pytest.raises(UnknownNameError, match=r"did you mean 'evidence_pkg\.fast:fast'"):
        prove("evidence_pkg.fast:fats", passed=1)
    assert not folder.exists()


def row(chip: str = "sm90", status: Status = "ok", registers: int = 100) -> Row:
    return Row(
        backend="evident",
        op="evidence.double",
        kernel="evidence_pkg.fast:fast",
        chip=chip,
        status=status,
        configuration="64x64x32 w4",
        contract="wgmma",
        registers=registers,
        spills=0,
        shared_memory=1024,
        versions={"ptxas": "13.0"},
    )


def test_compiled_only_if_no_configuration_is_broken(backend, folder):
    rows = [row(), row("sm80"), row(registers=168), row("sm80", "broken")]
    (file,) = record_compiled(None, rows)
    ((record,), _) = load(folder)
    assert folder / record.place == file
    assert (record.chip, record.level, record.passed) == ("sm90", Level.COMPILED, 2)
    assert record.details == {"registers": 168, "spills": 0, "shared_memory": 1024, "contract": "wgmma"}
    assert record.ran_with == {"ptxas": "13.0", "configurations": "64x64x32 w4"}
    assert record_compiled(None, [row(), row("", "error")]) == []


def test_what_a_chip_does_not_offer_takes_nothing_from_what_it_does(backend, folder):
    rows = [row(), row(status="unsupported", registers=255), row("sm80", "not offered")]
    record_compiled(None, rows)
    ((record,), _) = load(folder)
    assert (record.chip, record.passed, record.refused, record.details["registers"]) == ("sm90", 1, 1, 100)


def test_what_ran_elsewhere_says_nothing_of_another_chip(prove, backend, folder):
    prove()
    record_compiled(None, [row()])
    assert {record.chip: record.level for record in load(folder)[0]} == {
        chip_name(torch.device("cpu")): Level.RAN,
        "sm90": Level.COMPILED,
    }


def test_chip_names_are_words_and_those_of_cpus_are_known():
    name = chip_name(torch.device("cpu"))
    assert name == " ".join(name.split())
    assert torch.backends.cpu.get_cpu_capability().lower() in name
    assert is_cpu(name)
    assert is_cpu(chip_name(torch.device("cpu"), "avx512_bf16"))
    assert not any(map(is_cpu, ("NVIDIA H200", "NVIDIA A100 (80GB)", "sm90", "Triton's interpreter")))
