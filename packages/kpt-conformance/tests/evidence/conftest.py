"""What the tests of evidence share: a package on the import path, committed, its backend, and its records."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evidence_package import write_package

from kpt_conformance.evidence import Outcomes, Place, record_success, verdict
from kpt_conformance.evidence.counting import _checks
from kpt_core import registry


@pytest.fixture
def git():
    """Run git in a folder."""

    def run(where: Path, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return run


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of the package `evidence_pkg`, whose op and cases are there."""
    folder = tmp_path / "source"
    write_package(folder)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("evidence_pkg.double")
    table = importlib.import_module("evidence_pkg.cases").TABLE
    registry._cases()["evidence.double"] = table
    yield folder / "evidence_pkg"
    registry._cases().pop("evidence.double", None)
    registry._ops.pop("evidence.double")
    registry.forget_selections()
    for name in [name for name in sys.modules if name.partition(".")[0] == "evidence_pkg"]:
        del sys.modules[name]


@pytest.fixture
def commit(package, git):
    """Commit all of the package as it is; the commit."""

    def commit() -> str:
        if not (package.parent / ".git").exists():
            git(package.parent, "init", "--quiet")
        git(package.parent, "add", ".")
        git(package.parent, "commit", "--quiet", "--allow-empty", "-m", "all")
        return git(package.parent, "rev-parse", "--short=12", "HEAD")

    return commit


@pytest.fixture
def backend(package, monkeypatch):
    added = importlib.import_module("evidence_pkg.backend").Evident()
    registry.add_backend(added)
    every = verdict.registered
    monkeypatch.setattr(verdict, "registered", lambda: [c for c in every() if c.op == "evidence.double"])
    yield added
    registry.remove_backend(added.name)


@pytest.fixture
def folder(package) -> Path:
    """Of the package's records."""
    return package / "evidence"


@pytest.fixture
def place(tmp_path) -> Place:
    """Of table and ratchet, in no git work tree."""
    return Place(tmp_path / "support.md", tmp_path / "ratchet.json")


@pytest.fixture
def prove(backend, commit):
    """Commit the package, and record that a kernel passed on this machine's CPU."""

    def prove(kernel: str = "evidence_pkg.fast:fast", folder: Path | None = None, committing=True, **outcomes) -> Path:
        """Of `passed`, all checks unless it is said, `refused` and `skipped` ones."""
        if committing:
            commit()
        owner = "reference" if kernel == "reference" else backend.name
        where = {"op": "evidence.double", "backend": owner, "device": torch.device("cpu")}
        refused, skipped = (outcomes.pop(name, 0) for name in ("refused", "skipped"))
        passed = outcomes.pop("passed", _checks(owner, "cpu")["evidence.double", kernel] - refused - skipped)
        each = "p" * passed + "r" * refused + "s" * skipped
        return record_success(folder, kernel=kernel, outcomes=Outcomes(each=each, **outcomes), **where)

    return prove
