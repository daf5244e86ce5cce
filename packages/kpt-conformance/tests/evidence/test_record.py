"""Records: what is written, what is refused when read, when they are replaced."""

import json

import pytest
from evidence_package import RECORD, replaced

from kpt_conformance.evidence import save
from kpt_core.evidence import EvidenceError, Level, load
from kpt_core.evidence.record import loads


def test_levels_are_a_ladder():
    assert sorted(Level) == [Level.CLAIMED, Level.COMPILED, Level.INTERPRETED, Level.RAN]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "evidence"


def test_a_record_survives_its_file(folder):
    file = save(folder, RECORD)
    assert file == folder / "moe.experts--somewhere.moe-experts--chip-9-fast.json"
    assert load(folder) == ([RECORD], [])
    assert list(folder.rglob(".*")) == []


WRONG = {
    "format": "kpt-evidence-2",
    "op": "experts",
    "kernel": "",
    "backend": None,
    "chip": "two\nlines",
    "level": "claimed",
    "device": "",
    "hashes": {"kernel": "abc"},
    "ran_with": {"torch": 2},
    "absent": [{"check": "vmapped"}],
    "versions": {},
    "date": "2026-11-31T00:00:00Z",
    "commit": "a commit",
    "passed": True,
    "refused": None,
    "skipped": 1.5,
    "outcomes": "prx",
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
        ('{"loss": 1.5}', "lacks absent, backend.* and also has loss"),
        (RECORD.dumps().replace('"chip"', '"ship"'), "it lacks chip and also has ship"),
        (RECORD.dumps().replace('"moe.experts"', '"moe.other"'), "belongs to .*moe.other--"),
        (RECORD.dumps().replace('"2.13.0"', '"2.12.0"'), "hash of library is not that of ran_with"),
        (RECORD.dumps().replace('"passed": 412', '"passed": 413'), "outcomes has other numbers of p, r and s"),
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
    (folder / "notes.txt").write_text("it ran")
    assert len(load(folder)[1]) == 1


def test_a_higher_level_of_the_same_files_and_suite_stays(folder):
    save(folder, replaced(level=Level.INTERPRETED))
    save(folder, replaced(level=Level.COMPILED))
    assert load(folder)[0][0].level is Level.INTERPRETED
    save(folder, RECORD)
    assert load(folder)[0] == [RECORD]
    changed = replaced(level=Level.COMPILED, hashes=RECORD.hashes | {"suite": "f" * 64})
    save(folder, changed)
    assert load(folder)[0] == [changed]


def test_a_newer_record_of_the_same_level_takes_the_place(folder):
    save(folder, RECORD)
    save(folder, replaced(date="2026-11-22T09:30:00Z"))
    assert [record.date for record in load(folder)[0]] == ["2026-11-22T09:30:00Z"]
