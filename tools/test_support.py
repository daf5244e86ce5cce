"""Records, ratchet and docs/support.md are true, and say of every kernel what the records prove, and nothing else."""

from pathlib import Path

import pytest

from kpt_conformance.evidence import Place, faults

ROOT = Path(__file__).parents[1]


def test_the_support_table_is_what_the_records_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # so that the commands in the sentences are short
    found = faults(Place())
    assert not found, "\n".join(found)
