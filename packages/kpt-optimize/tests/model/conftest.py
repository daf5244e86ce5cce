"""Time that a test controls."""

import pytest

from clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this test, which `kpt_core` measures by."""
    found = Clock()
    monkeypatch.setattr("kpt_optimize.measure.time", found)
    return found
