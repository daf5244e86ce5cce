"""What every test of the core gets: no installed plug-ins, no settings from outside, nothing left behind."""

from collections.abc import Callable, Iterator

import pytest
import torch

import kpt_core
from clock import CLOCK
from kpt_core import Backend, _registry
from loopback import Fault


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what is installed beside the core; start and end without settings, selections and quarantine."""
    for variable in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KPT_TUNING", "0")  # what this machine's user measured is not for tests
    monkeypatch.setattr(_registry, "entry_points", lambda group: ())
    monkeypatch.setattr(_registry, "_added", {})
    monkeypatch.setattr(Fault, "error", None)
    monkeypatch.setattr(Fault, "calls", 0)
    kpt_core.refresh()
    yield
    monkeypatch.undo()
    kpt_core.refresh()


@pytest.fixture
def add() -> Iterator[Callable[[Backend], Backend]]:
    """Add a backend for the length of a test."""
    added: list[str] = []

    def add_backend(backend: Backend) -> Backend:
        kpt_core.add_backend(backend)
        added.append(backend.name)
        return backend

    yield add_backend
    for name in added:
        if name in kpt_core.backends():
            kpt_core.remove_backend(name)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set an environment variable of KPT and have it read."""

    def set_variable(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        kpt_core.refresh()

    return set_variable


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(4)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` measures by a clock that moves when a test says so."""
    monkeypatch.setattr("kpt_core._measure.time", CLOCK)
