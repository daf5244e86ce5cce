"""What the tests of evidence share: a package on the import path, its backend, and a folder of records."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from evidence_package import write_package

from kpt_conformance.evidence import record_success
from kpt_core import Backend, Kernel, registry


class Evident(Backend):
    """Serves the CPU with two kernels."""

    name = "evident"
    device_types = ("cpu",)

    def __init__(self) -> None:
        self.offered = [
            Kernel(
                "evidence.double",
                forward="evidence_pkg.fast:fast",
                backward="evidence_pkg.back:fast_backward",
                requires={"bf16"},
                dtypes={"float32", "bfloat16"},
                unsupported="evidence_pkg.refusal:unsupported",
                priority=5,
                deterministic=True,
            ),
            Kernel("evidence.double", "evidence_pkg.interpreted:interpreted"),
        ]

    def capabilities(self, device: torch.device) -> frozenset[str]:
        return frozenset({"bf16"})

    def kernels(self) -> list[Kernel]:
        return self.offered


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of the package `evidence_pkg`, whose op is defined."""
    folder = tmp_path / "source"
    write_package(folder)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("evidence_pkg.double")
    yield folder / "evidence_pkg"
    registry._ops.pop("evidence.double")
    for name in [name for name in sys.modules if name.partition(".")[0] == "evidence_pkg"]:
        del sys.modules[name]


@pytest.fixture
def backend(package):
    added = Evident()
    registry.add_backend(added)
    yield added
    registry.remove_backend(added.name)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of the records."""
    return tmp_path / "evidence"


@pytest.fixture
def prove(folder, backend):
    """Record that a kernel passed on this machine's CPU."""

    def prove(kernel: str = "evidence_pkg.fast:fast", checks: int = 412, **options) -> Path:
        owner = "reference" if kernel == "reference" else backend.name
        where = {"op": "evidence.double", "backend": owner, "device": torch.device("cpu")}
        return record_success(folder, kernel=kernel, checks=checks, **where, **options)

    return prove
