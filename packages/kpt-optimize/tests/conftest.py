"""What every test gets: no installed plug-ins but the tables' policy, no settings from outside, nothing left behind."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_core import Backend, Kernel, discovery, registry

# The backends of the core's own tests serve here too.
sys.path.insert(1, str(Path(__file__).parents[2] / "kpt-core" / "tests"))

import loopback
import tuning_kernels
from clock import CLOCK
from loopback import Fault

POLICY = EntryPoint("tuning", "kpt_optimize.tuning.tables:tuned_choices", "kpt.policies")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what is installed beside; start and end without settings, selections and quarantine."""
    torch.manual_seed(0)
    for variable in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KPT_TUNING", "0")  # what this machine's user measured is not for tests
    monkeypatch.setattr(discovery, "entry_points", lambda group: [POLICY] if group == POLICY.group else [])
    monkeypatch.setattr(registry, "_added", {})
    for name, value in Fault.INITIAL.items():
        monkeypatch.setattr(Fault, name, value)
    monkeypatch.setattr("kpt_optimize.measure.time", CLOCK)  # it moves when a test says so
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
        entries = [POLICY, EntryPoint("sample", "loopback:OPS", "kpt.ops")]
        monkeypatch.setattr(loopback, "OPS", kernels, raising=False)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [each for each in entries if each.group == group])
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
def tuning_folder(setting: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `tune` writes; the cases are those of `tuning_kernels`."""
    setting("KPT_TUNING", str(tmp_path / "tables"))
    tuning_kernels.use_cases(monkeypatch)
    return tmp_path / "tables"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(4)


@pytest.fixture
def fresh_compiler() -> None:
    """Begin without compiled code."""
    torch._dynamo.reset()
