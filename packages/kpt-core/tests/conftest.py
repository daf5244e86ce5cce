"""What every test of the core gets: no installed plug-ins, no settings from outside, nothing left behind."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import kpt_core
import loopback
from kpt_core import Backend, Kernel, discovery, registry
from loopback import Fault
from plugins import GOOD, entry_points_in, install


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what is installed beside the core; start and end without settings, selections and quarantine."""
    torch.manual_seed(0)
    for variable in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KPT_TUNING", "0")  # what this machine's user measured is not for tests
    monkeypatch.setattr(discovery, "entry_points", lambda group: ())
    monkeypatch.setattr(registry, "_added", {})
    for name, value in Fault.INITIAL.items():
        monkeypatch.setattr(Fault, name, value)
    kpt_core.refresh()
    yield
    monkeypatch.undo()
    kpt_core.refresh()


@pytest.fixture
def add() -> Iterator[Callable[[Backend], Backend]]:
    """Add a backend for the length of a test."""
    added: list[str] = []

    def add_backend(backend: Backend) -> Backend:
        registry.add_backend(backend)
        added.append(backend.name)
        return backend

    yield add_backend
    for name in added:
        if name in kpt_core.backends():
            registry.remove_backend(name)


@pytest.fixture
def list_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have an installed feature package list kernels in plain PyTorch beside its ops."""

    def install(*kernels: Kernel) -> None:
        entry = EntryPoint("sample", "loopback:OPS", "kpt.ops")
        monkeypatch.setattr(loopback, "OPS", kernels, raising=False)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [entry] if group == "kpt.ops" else [])
        kpt_core.refresh()

    return install


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


@pytest.fixture
def fresh_compiler() -> None:
    """Begin without compiled code."""
    torch._dynamo.reset()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution into a folder that this process sees."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    yield lambda name, source=GOOD, *args, **entries: install(tmp_path, name, source, *args, **entries)
    for module in set(sys.modules) - before:
        if (tmp_path / f"{module}.py").exists():
            del sys.modules[module]
