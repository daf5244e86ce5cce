"""The files that a kernel is made of, and what changes their hash."""

import sys

import pytest

from kpt_conformance.evidence import registered
from kpt_core.evidence import EvidenceError, sources_of


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
