"""What a run enters: nothing that was refused counts as proof, and what was absent is listed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kpt_conformance import ledger
from kpt_conformance.ledger import Ledger, _Tally, _Test, absences

REFUSED = "refused: it has no batching rule"


@pytest.fixture
def entered(monkeypatch):
    """Enter the tests of a kernel; what was recorded, and why it was not."""
    monkeypatch.setattr(ledger, "observe", lambda note: None)
    recorded = []

    def record(folder, *, outcomes, **where):
        recorded.append(outcomes)
        return Path("record.json")

    monkeypatch.setattr(ledger, "record_success", record)

    class Subject(SimpleNamespace):
        __hash__ = object.__hash__

        def __str__(self):
            return "kernel"

    def enter(*tests):
        book = Ledger(Path("package"))
        kernel = Subject(
            composite=False, kernel=1, op=SimpleNamespace(name="a.b"), target="k", backend="x", device="cpu"
        )
        book._enter(kernel, _Tally(list(tests)))
        return recorded, book.left_out

    return enter


def test_a_check_that_was_refused_in_a_dtype_keeps_the_kernel_from_its_record(entered):
    recorded, left_out = entered(
        _Test(("values", "float32"), "passed"),
        _Test(("values", "bfloat16"), "refused", REFUSED),
        _Test(("values", "bfloat16"), "skipped", "the case has no padding"),
    )
    assert recorded == []
    assert left_out == {"kernel": "it refused every trial of values in bfloat16"}


def test_what_was_absent_with_leave_is_listed(entered):
    ((outcomes,), left_out) = entered(
        _Test(("values", "float32"), "passed"),
        _Test(("values", "float32"), "refused", REFUSED),
        _Test(("padding", "float32"), "skipped", "the case has no padding"),
        _Test(("padding", "float16"), "skipped", "the case has no padding"),
        _Test(("wrong_input", ""), "passed"),
    )
    assert left_out == {}
    assert outcomes.each == "prssp"
    reason = "the case has no padding"
    assert outcomes.absent == (
        {"check": "padding", "dtypes": ["float16", "float32"], "refused": 0, "skipped": 2, "reason": reason},
    )


@pytest.mark.parametrize("outcome", ["failed", "xfailed", "not run"])
def test_whatever_failed_or_was_not_run_keeps_the_kernel_from_its_record(entered, outcome):
    recorded, left_out = entered(_Test(("values", "float32"), "passed"), _Test(("values", "float32"), outcome))
    assert (recorded, left_out) == ([], {"kernel": f"1 {outcome}"})


def test_where_nothing_passed_nothing_is_recorded(entered):
    recorded, left_out = entered(_Test(("padding", "float32"), "skipped", "no padding"))
    assert (recorded, left_out) == ([], {"kernel": "none passed"})


def test_absences_name_a_refusal_before_another_reason():
    tests = [
        _Test(("vmapped", "float32"), "skipped", "nothing to try"),
        _Test(("vmapped", "float32"), "refused", f"{REFUSED}\nand more"),
    ]
    (found,) = absences(tests)
    assert (found["refused"], found["skipped"], found["reason"]) == (1, 1, REFUSED)
