"""Records that came with a package are read when asked, and `KPT_REQUIRE_EVIDENCE` refuses what lacks them."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kpt_core
from kpt_core import Backend, InputError, KptError, registry
from kpt_core.evidence import Level, Record, claim_of_kernel, proofs
from kpt_core.evidence.record import hash_of

Setting = Callable[[str, str], None]
FILES = {
    "__init__.py": "",
    "op.py": """
from torch import Tensor

from kpt_core import op

@op("proof.triple")
def triple(x: Tensor) -> Tensor:
    return x * 3
""",
    "kernel.py": "from .deep import three\n\ndef triple(call):\n    return call.x * three()\n",
    "deep.py": "def three():\n    return 3.5\n",
    "backend.py": """
from kpt_core import Backend, Kernel

class Proven(Backend):
    name = "proven"
    device_types = ("cpu",)

    def kernels(self):
        return [Kernel("proof.triple", "proof_pkg.kernel:triple", differentiable=True)]
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with an op and a backend, whose kernel tells by its numbers that it ran."""
    folder = tmp_path / "proof_pkg"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("proof_pkg.op")
    yield folder
    registry._ops.pop("proof.triple")
    for name in [name for name in sys.modules if name.startswith("proof_pkg")]:
        del sys.modules[name]


@pytest.fixture
def backend(package: Path, add: Callable[[Backend], Backend]) -> Backend:
    return add(importlib.import_module("proof_pkg.backend").Proven())


@pytest.fixture
def prove(package: Path, backend: Backend) -> Callable[..., Record]:
    """Write a record of the kernel as it is."""

    def prove(**changes: Any) -> Record:
        (kernel,) = backend.kernels()
        claim = claim_of_kernel(backend, kernel)
        here = {"kernel": claim.sources().hash, "contract": claim.contract().hash, "suite": "0" * 64}
        record = Record(
            op=claim.op,
            kernel=claim.kernel,
            backend=claim.backend,
            chip="Some CPU (avx2)",
            device="cpu",
            level=Level.RAN,
            hashes=here | {"library": hash_of({"torch": "2"})},
            ran_with={"torch": "2"},
            versions={"python": "3.11"},
            date="2026-11-21T09:30:00Z",
            commit=None,
            passed=100,
            outcomes="p" * 100,
        )
        record = replace(record, **changes)
        (package / "evidence").mkdir(exist_ok=True)
        (package / "evidence" / record.place).write_text(record.dumps())
        registry.forget_selections()
        return record

    return prove


def ran() -> bool:
    """Whether the kernel serves a call."""
    return float(kpt_core.registry.get_op("proof.triple")(torch.ones(()))) == 3.5


def test_what_is_not_proven_is_refused_with_what_to_do(backend: Backend, setting: Setting) -> None:
    assert ran()
    setting("KPT_REQUIRE_EVIDENCE", "ran")
    assert not ran()
    selection = kpt_core.explain("proof.triple", torch.ones(()))
    (reason,) = [refusal.reason for refusal in selection.refusals if refusal.backend == "proven"]
    assert reason.startswith("evidence is claimed; KPT_REQUIRE_EVIDENCE asks for ran: run `nox -s evidence`")


@pytest.mark.parametrize("asked", ["compiled", "interpreted", "ran"])
@pytest.mark.parametrize("level", [Level.COMPILED, Level.INTERPRETED, Level.RAN])
def test_a_level_is_enough_for_those_below(prove: Any, setting: Setting, asked: str, level: Level) -> None:
    prove(level=level)
    setting("KPT_REQUIRE_EVIDENCE", asked)
    assert ran() is (level >= Level[asked.upper()])


def test_the_best_of_several_chips_counts(prove: Any, backend: Backend) -> None:
    low = prove(level=Level.COMPILED, chip="sm90")
    high = prove()
    (kernel,) = backend.kernels()
    assert proofs(claim_of_kernel(backend, kernel)) == (high, low)


@pytest.mark.parametrize("changed", ["kernel.py", "deep.py", "op.py"])
def test_a_record_of_other_files_proves_nothing(prove: Any, setting: Setting, package: Path, changed: str) -> None:
    prove()
    setting("KPT_REQUIRE_EVIDENCE", "ran")
    assert ran()
    with (package / changed).open("a") as file:
        file.write("# changed\n")
    kpt_core.refresh()
    assert not ran()


def test_a_library_that_is_not_what_was_built_proves_nothing(
    prove: Any, setting: Setting, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def junk() -> dict[str, str]:
        raise KptError("the library has not the bytes that its build wrote down")

    prove()
    setting("KPT_REQUIRE_EVIDENCE", "ran")
    assert ran()
    monkeypatch.setattr(backend, "library", junk)
    registry.forget_selections()
    assert not ran()
    refusals = kpt_core.explain("proof.triple", torch.ones(())).refusals
    assert any("its evidence can't be believed: the library has not the bytes" in each.reason for each in refusals)


def test_a_file_that_is_no_record_proves_nothing_and_breaks_nothing(
    prove: Any, setting: Setting, package: Path
) -> None:
    prove()
    for file in (package / "evidence").iterdir():
        file.write_text("{}")
    setting("KPT_REQUIRE_EVIDENCE", "compiled")
    assert not ran()


@pytest.mark.parametrize("value", ["yes", "claimed", "1"])
def test_an_unknown_level_is_an_error_that_shows_it(backend: Backend, setting: Setting, value: str) -> None:
    setting("KPT_REQUIRE_EVIDENCE", value)
    with pytest.raises(InputError, match=f"KPT_REQUIRE_EVIDENCE='{value}': expected one of compiled, interpreted, ran"):
        ran()


def test_the_reference_needs_no_evidence(backend: Backend, setting: Setting) -> None:
    setting("KPT_REQUIRE_EVIDENCE", "ran")
    with kpt_core.use("reference"):
        assert float(registry.get_op("proof.triple")(torch.ones(()))) == 3.0


def test_nothing_is_read_unless_it_is_asked_for() -> None:
    code = (
        "import sys, torch, kpt_core\n"
        "@kpt_core.op('a.b')\n"
        "def b(x: torch.Tensor) -> torch.Tensor: return x\n"
        "b(torch.ones(()))\n"
        "assert not [name for name in sys.modules if name.startswith('kpt_core.evidence')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
