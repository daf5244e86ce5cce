"""`--kpt-sample`: what is not proven is tried in full, and of the rest enough to find a wrong kernel with a record."""

import json
import re
from dataclasses import replace

import pytest

from kpt_conformance.evidence import save
from kpt_conformance.sampling import Share, parse_share
from kpt_core import registry
from kpt_core.evidence import Level, load
from kpt_core.evidence.record import hash_of

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest

import evidence_pkg.double
from evidence_pkg.backend import Evident
from evidence_pkg.cases import TABLE
from kpt_core import registry

registry._cases()["evidence.double"] = TABLE
registry.add_backend(Evident())


@pytest.fixture(autouse=True, scope="session")
def keep():
    refresh = registry.refresh
    registry.refresh = lambda: None
    yield
    registry.refresh = refresh
"""
ALL = (
    "--kpt-backend=evident",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore",
    "-k",
    "fast and not compile and not inductor",
)


@pytest.fixture
def run(backend, package, run_here):
    """Run the suite over one kernel of the package `evidence_pkg`, in this process."""
    table = registry._cases()["evidence.double"]

    def run(*options: str):
        registry.forget_selections()  # what was read of records
        registry._cases()["evidence.double"] = table  # a run forgets what was not found by entry points
        return run_here(*ALL, *options)

    return run


def collected(run, *options: str) -> list[str]:
    return [line for line in run("--collect-only", *options).outlines if "::" in line]


def test_a_share_is_tried_of_what_is_proven_and_the_seed_gives_it_again(run, prove):
    every = collected(run)
    assert collected(run, "--kpt-sample=0.1:1") == every, "there is no record"
    prove(passed=412)
    some = collected(run, "--kpt-sample=0.1:1")
    assert some == collected(run, "--kpt-sample=0.1:1")
    assert some != collected(run, "--kpt-sample=0.1:2")
    assert 0 < len(some) < 0.7 * len(every)
    checks = {re.search(r"\[(\w+)-", line)[1] for line in every}
    assert {re.search(r"\[(\w+)-", line)[1] for line in some} == checks, "each check is tried once at least"


@pytest.fixture
def proof(backend):
    """What a run on this machine would take from records of a kernel."""
    from kpt_conformance.sampling import _proof
    from kpt_conformance.suite import subjects

    def proof():
        registry.forget_selections()
        return _proof(subjects("evident")[0][0])

    return proof


@pytest.mark.parametrize("changed", ["fast.py", "back.py", "double.py", "cases.py"])
def test_a_changed_kernel_or_contract_is_not_proven(prove, proof, package, changed):
    assert proof() is None
    prove()
    assert proof() is not None
    with (package / changed).open("a") as file:
        file.write("# changed\n")
    assert proof() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"level": Level.INTERPRETED},
        {"device": "cuda"},
        {"ran_with": {"sources": "0" * 64}},
    ],
)
def test_another_level_device_or_native_source_proves_nothing(prove, proof, folder, changes):
    change_record(prove(), folder, changes)
    assert proof() is None


@pytest.mark.parametrize("changes", [{"ran_with": {"torch": "1.0"}}, {"hashes": {"suite": "0" * 64}}])
def test_of_what_another_suite_or_torch_proved_more_is_tried(prove, proof, folder, changes):
    file = prove()
    assert proof().here
    change_record(file, folder, changes)
    assert not proof().here


def change_record(file, folder, changes):
    (record,) = load(folder)[0]
    ran_with = changes.get("ran_with", record.ran_with)
    hashes = record.hashes | changes.get("hashes", {}) | {"library": hash_of(ran_with)}
    file.unlink()
    save(folder, replace(record, **changes | {"hashes": hashes}))


def test_any_chip_of_the_kind_will_do(prove, proof, folder):
    file = prove()
    (record,) = load(folder)[0]
    file.unlink()
    save(folder, replace(record, chip="AMD EPYC 9R14 (avx512, bf16)"))
    assert proof().record.chip == "AMD EPYC 9R14 (avx512, bf16)"


def test_a_library_that_is_junk_proves_nothing(prove, proof, package):
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1"}))
    prove()
    assert proof() is not None
    (package / "library.json").write_text(json.dumps({"isa": "avx512", "sources": "1"}))
    assert proof() is None, "another instruction set runs here"
    (package / "library.json").write_text(json.dumps({"isa": "baseline", "sources": "1", "junk": True}))
    assert proof() is None


def test_a_record_that_a_wrong_kernel_did_not_earn_is_found_whatever_the_seed(run, prove, package):
    (package / "inner" / "deeper.py").write_text("def twice(x): return x * 2.1\n")
    prove(passed=412)
    result = run("--kpt-sample=0.1")
    assert result.parseoutcomes()["failed"] >= 1
    assert result.parseoutcomes()["deselected"] > 0
    result.stdout.fnmatch_lines(["*a share is tried, --kpt-sample=0.1:*", "*evidence_pkg.fast:fast ran on *: 10% *"])


def test_a_record_that_says_passed_of_what_is_skipped_is_found(run, prove):
    prove(passed=412)
    asked = ("-k", "fast and padding")  # the case has none
    assert run(*asked).parseoutcomes().keys() == {"skipped", "deselected"}
    result = run("--kpt-sample=1", *asked)
    assert result.parseoutcomes()["failed"] >= 1
    result.stdout.fnmatch_lines(
        ["*this check is skipped here (*), and the record of evidence_pkg.fast:fast on * passed*"]
    )


def test_a_sample_proves_nothing_anew(run):
    result = run("--kpt-sample=0.1", "--kpt-evidence=package")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kpt-evidence needs the whole suite: leave out --kpt-sample*"])


@pytest.mark.parametrize("text", ["", "0", "1.5", "nan", "a", "0.1:", "0.1:b"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError, match="is no share; expected a number above 0"):
        parse_share(text)


def test_a_share_has_one_of_each_stratum():
    share = Share(0.1, seed=3)
    items = [f"{letter}{number}" for letter in "abc" for number in range(25)]
    found = share.chosen(items, lambda item: item[0], str)
    assert [sum(name.startswith(letter) for name in found) for letter in "abc"] == [3, 3, 3]
    assert found == share.chosen(items[::-1], lambda item: item[0], str)
    assert str(parse_share(str(share))) == "0.1:3"
    assert parse_share("0.1").seed != parse_share("0.1").seed


def test_processes_side_by_side_choose_the_same(prove, package, pytester, monkeypatch):
    pytest.importorskip("xdist")
    prove(passed=412)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    pytester.makeconftest(CONFTEST)
    result = pytester.runpytest_subprocess(*ALL, "--kpt-sample=0.1", "-n2", "-k", "fast and result_type", timeout=280)
    assert result.ret == 0, result.stdout.str()
