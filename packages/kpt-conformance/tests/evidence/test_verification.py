"""Every way to forge, delete or outdate a proof turns the check red: what a record says and can be looked up is."""

import dataclasses
import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from evidence_package import replaced

from kpt_conformance.evidence import examine, faults, record_compiled, save, write
from kpt_core.evidence import Level, load
from kpt_core.evidence.record import hash_of

CPU = "Intel Xeon (avx512, amx)"


@pytest.fixture
def proven(prove, place, folder):
    """The record of a kernel that was proven honestly."""
    prove()
    write(place)
    assert faults(place) == []
    return load(folder)[0][0]


@pytest.fixture
def forged(folder, place, proven):
    """Put a changed record in the honest one's place, and give what the check says of it."""

    def forge(**changes):
        (folder / proven.place).unlink()
        record = dataclasses.replace(proven, **changes)
        each = "p" * record.passed + "r" * record.refused + "s" * record.skipped
        save(folder, dataclasses.replace(record, outcomes=each))
        write(place)
        return [fault for fault in faults(place) if "was ran on" not in fault]

    return forge


def later(**offset):
    return (datetime.now(UTC) + timedelta(**offset)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"chip": "NVIDIA H200"}, "ran on a device of type cpu that is called 'NVIDIA H200'"),
        ({"chip": "NVIDIA H200", "device": "cuda"}, "'NVIDIA H200' (cuda), and the kernel is for cpu"),
        ({"chip": "sm90"}, "ran on 'sm90', which is no device"),
        ({"chip": "sm90", "level": Level.COMPILED}, "is compiled for 'sm90', for which evident compiles nothing"),
        ({"level": Level.INTERPRETED}, "only kernels made with Triton are"),
        ({"passed": 10_000}, "tells of 10000 checks, and there are"),
        ({"passed": 1}, "tells of 1 checks, and there are"),
        ({"refused": 1}, "checks, and there are"),
        ({"date": later(days=400)}, "which is yet to come"),
        ({"date": "2020-01-01T00:00:00Z"}, "before its commit"),
        ({"commit": "0123456789ab"}, "names commit 0123456789ab, which is not there"),
        ({"commit": None}, "names no commit"),
    ],
)
def test_a_forged_field_is_found(forged, changes, fault):
    found = forged(**changes)
    assert any(fault in sentence for sentence in found), found


def test_a_triton_kernel_ran_on_no_cpu(prove, place, folder, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    prove("evidence_pkg.interpreted:interpreted")
    (record,) = load(folder)[0]
    write(place)
    assert faults(place) == []
    (folder / record.place).unlink()
    save(folder, dataclasses.replace(record, level=Level.RAN, chip=CPU))
    write(place)
    assert any("ran on the CPU 'Intel Xeon (avx512, amx)', where Triton only interprets" in f for f in faults(place))


def test_a_commit_of_other_files_is_found(forged, proven, package, commit, git):
    before = proven.commit
    (package / "inner" / "deeper.py").write_text("def twice(x): return 3 * x\n")
    other = commit()
    (package / "inner" / "deeper.py").write_text("from kpt_core import InputError\n\ndef twice(x): return x + x\n")
    commit()
    found = forged(commit=other, date=later())
    assert any(f"names commit {other}, which has another evidence_pkg.inner.deeper" in fault for fault in found), found
    assert forged(commit=before) == []


def test_a_commit_that_landed_under_another_name_is_told_and_noted(forged, place, package, commit):
    told = package.parent / "evidence" / "rewritten-commits.txt"
    told.parent.mkdir(exist_ok=True)
    told.write_text("# Gone.\n\n0123456789ab squashed into one\n")
    assert forged(commit="0123456789ab") == []
    assert any("so the files of the present one were looked up instead" in note for note in examine(place).notes)
    assert any("is not there" in fault for fault in forged(commit="0123456789ac"))
    (package / "inner" / "deeper.py").write_text("def twice(x): return 3 * x\n")
    commit()
    assert any("is stale: the kernel changed" in fault for fault in forged(commit="0123456789ab"))


def test_a_commit_of_another_branch_is_found(forged, package, commit, git):
    main = commit()
    git(package.parent, "checkout", "--quiet", "-b", "aside")
    other = commit()
    git(package.parent, "checkout", "--quiet", "--detach", main)
    found = forged(commit=other, date=later())
    assert any(f"names commit {other}, which did not lead to the present one" in fault for fault in found), found


def test_another_instruction_set_than_the_chip_names_is_found(prove, place, folder, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1"}))
    prove()
    (record,) = load(folder)[0]
    (folder / record.place).unlink()
    save(folder, dataclasses.replace(record, chip=record.chip.replace("(baseline)", "(avx512)")))
    write(place)
    assert any("with instruction set baseline" in fault for fault in faults(place))


def test_a_library_of_other_sources_is_found(prove, place, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1"}))
    prove()
    write(place)
    assert faults(place) == []
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "2"}))
    assert any("ran with a library of other sources than are here" in fault for fault in faults(place))


def test_a_library_that_was_replaced_by_junk_is_found_and_nothing_believed(prove, place, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1"}))
    prove()
    write(place)
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1", "junk": True}))
    found = examine(place)
    assert any("nothing is proven of backend evident: the library has not the bytes" in f for f in found.faults)
    assert found.believed == ()


def test_a_library_that_was_not_built_again_after_a_change_is_found(prove, place, package, commit):
    code = package.parent / "native" / "part.cpp"
    code.parent.mkdir()
    code.write_text("int part;\n")
    (package / "built").mkdir()
    (package / "built" / "sources.txt").write_text(f"part.cpp {hashlib.sha256(code.read_bytes()).hexdigest()}\n")
    (package.parent / ".gitignore").write_text("built/\n")
    with (package / "fast.py").open("a") as file:
        file.write('\nKERNEL_SOURCES = ("built/sources.txt",)\n')
    prove()
    write(place)
    assert faults(place) == []
    code.write_text("int another;\n")
    commit()
    assert any("is of another part.cpp than commit" in fault for fault in faults(place))


def test_another_suite_is_noted_and_makes_no_record_stale(forged, place, proven):
    assert forged(hashes=proven.hashes | {"suite": "0" * 64}, passed=3, outcomes="ppp") == []
    assert any("1 records are of an earlier suite" in note for note in examine(place).notes)


def test_what_git_does_not_know_is_noted(prove, place):
    prove(committing=False)
    write(place)
    found = examine(place)
    assert found.faults == ()
    assert any("git knows nothing of its files" in note for note in found.notes)


def test_a_shallow_clone_is_noted(prove, place, package, git, tmp_path, commit, monkeypatch):
    prove()
    commit()
    deep = package.parent
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{deep}", str(clone))
    deep.rename(tmp_path / "away")
    clone.rename(deep)
    write(place)
    found = examine(place)
    assert found.faults == ()
    assert any("this clone is shallow" in note for note in found.notes)


def test_a_record_in_another_package_s_folder_is_found(proven, place, folder, backend):
    strange = replaced(op="evidence.double", kernel="evidence_pkg.gone:gone", backend="evident")
    save(folder, strange)
    assert any("offers evidence_pkg.gone:gone" in fault for fault in faults(place))


def test_a_forged_compile_record_of_too_many_configurations_is_found():
    pytest.importorskip("triton")
    pytest.importorskip("kpt_triton")
    from kpt_conformance.evidence import claim_of
    from kpt_conformance.evidence.counting import Counts

    claim = claim_of("moe.grouped_mm", "kpt_triton.moe.grouped_mm:forward", "nvidia")
    record = replaced(
        op=claim.op, kernel=claim.kernel, backend="nvidia", chip="sm90", device="cuda", level=Level.COMPILED
    )
    expected = Counts().expected(claim, record)
    assert expected is not None
    assert expected > 10
    assert hash_of(record.ran_with) == record.hashes["library"]


def test_a_compiled_record_is_for_a_chip_that_the_backend_compiles_for(proven, folder, place):
    from test_recording import row

    record_compiled(None, [row("gfx942")])
    assert any("is compiled for 'gfx942', for which evident compiles nothing" in fault for fault in faults(place))
