"""The ratchet: a proof that gets lost is missed, and what is lowered is lowered with a reason."""

import json

import pytest

from kpt_conformance.evidence import Place, faults, write
from kpt_conformance.evidence.__main__ import main
from kpt_core import Kernel
from kpt_core.evidence import EvidenceError, load

FAST = "evident/evidence.double/evidence_pkg.fast:fast"


@pytest.fixture
def proven(prove, place):
    file = prove()
    write(place)
    assert faults(place) == []
    return file


def levels(place: Place) -> dict[str, dict[str, str]]:
    return json.loads(place.ratchet.read_text())["kernels"]


def test_writing_raises_it(proven, place, folder):
    (record,) = load(folder)[0]
    assert levels(place)[FAST] == {record.chip: "ran"}
    assert levels(place)["reference/evidence.double/reference"] == {}


def test_deleting_the_records_of_a_kernel_and_writing_anew_is_found(proven, place):
    proven.unlink()
    write(place, prune=True)
    (fault,) = faults(place)
    assert f"{FAST} was ran on" in fault
    assert "is claimed now: prove it again (`nox -s evidence`)" in fault


def test_lowering_needs_a_reason_which_is_kept(proven, place):
    proven.unlink()
    with pytest.raises(SystemExit):
        main(["write", "--support", str(place.support), "--ratchet", str(place.ratchet), "--lower", " "])
    write(place, lower="that machine is gone")
    assert faults(place) == []
    (entry,) = json.loads(place.ratchet.read_text())["lowered"]
    assert (entry["kernel"], entry["was"], entry["now"], entry["reason"]) == (
        FAST,
        "ran",
        "claimed",
        "that machine is gone",
    )


def test_a_proof_that_it_does_not_hold_to_is_a_fault(prove, place):
    write(place)
    prove()
    assert any("does not hold" in fault and "which is proven" in fault for fault in faults(place))


def test_a_ratchet_that_is_gone_is_a_fault(proven, place):
    place.ratchet.unlink()
    assert any("take it from the repository" in fault for fault in faults(place))


def test_a_kernel_that_is_new_or_gone_is_a_fault_until_written(backend, place, proven):
    kept, *_ = backend.offered
    type(backend).offered = (kept, Kernel("evidence.double", "evidence_pkg.deep:factor"))
    found = "\n".join(faults(place))
    assert "lacks evident/evidence.double/evidence_pkg.deep:factor" in found
    assert "has evident/evidence.double/evidence_pkg.interpreted:interpreted, which nothing offers" in found
    write(place)
    assert "which nothing offers" in "\n".join(faults(place))
    write(place, prune=True)
    assert faults(place) == []


def test_taking_it_back_by_hand_is_found_in_the_history(prove, package, git, commit):
    here = Place(package.parent / "support.md", package.parent / "ratchet.json")
    file = prove()
    write(here)
    commit()
    assert faults(here) == []
    file.unlink()
    document = json.loads(here.ratchet.read_text())
    document["kernels"][FAST] = {}
    here.ratchet.write_text(json.dumps(document))
    write(here)
    commit()
    (fault,) = faults(here)
    assert f"asked for ran of {FAST}" in fault
    write(here, lower="for a reason")
    assert faults(here), "lowering says what the file has, which is nothing any more"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "x"}', '{"format": "kpt-ratchet-1", "kernels": {"a": {"b": 1}}}']
)
def test_a_file_that_is_no_ratchet_is_a_fault(backend, place, text):
    write(place)
    place.ratchet.write_text(text)
    assert any("is no ratchet" in fault for fault in faults(place))
    with pytest.raises(EvidenceError, match="is no ratchet"):
        write(place)
