"""`python -m kpt_conformance.aot --sample`: what no record proves is compiled in full, of the rest a share."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest
from test_recording import row

from kpt_conformance.aot.__main__ import main
from kpt_conformance.aot.chips import CHIPS
from kpt_conformance.aot.contract import Contract
from kpt_conformance.aot.declared import Job, Source, Task
from kpt_conformance.aot.row import Row
from kpt_conformance.aot.sampling import sample
from kpt_conformance.evidence import record_compiled
from kpt_conformance.sampling import Share
from kpt_core import registry

pytest.importorskip("triton")
SHARE = Share(0.1, seed=1)


@pytest.fixture
def found(backend):
    """Forty configurations of a kernel for each of two chips, and a declaration that is wrong."""
    contract = object.__new__(Contract)
    tasks: list[Task | Row] = [
        Task(
            backend="evident",
            kernel=backend.offered[0],
            job=Job(source=Source("evidence_pkg.fast:fast", 0), chip=CHIPS[chip], configuration=f"tile {number}"),
            program="forward",
            contract=contract,
        )
        for chip in ("sm80", "sm90")
        for number in range(40)
    ]
    return [*tasks, Row(backend="evident", op="", kernel="", status="error")]


def record(**changes: str) -> str:
    (file,) = record_compiled(None, [replace(row(), versions={"triton": version("triton"), **changes})])
    registry.forget_selections()
    return file


def test_what_is_not_proven_is_compiled_in_full(found):
    assert sample(found, SHARE) == found


def test_of_what_is_proven_a_share_is_compiled(found):
    record()
    some = sample(found, SHARE)
    chips = [task.job.chip.name for task in some if isinstance(task, Task)]
    assert (chips.count("sm80"), chips.count("sm90")) == (40, 4)
    assert isinstance(some[-1], Row), "what is wrong is told"
    assert some == sample(found, SHARE)
    assert some != sample(found, Share(0.1, seed=2))


def test_another_compiler_proves_nothing(found):
    record(triton="1.0")
    assert sample(found, SHARE) == found


def test_a_changed_kernel_or_judge_is_compiled_in_full(found, package):
    file = record()
    assert len(sample(found, SHARE)) < len(found)
    (package / "fast.py").write_text("def fast(call): return call.x\n")
    registry.forget_selections()
    assert sample(found, SHARE) == found
    file = record()
    document = json.loads(file.read_text())
    document["hashes"]["suite"] = "0" * 64
    file.write_text(json.dumps(document))
    registry.forget_selections()
    assert sample(found, SHARE) == found


@pytest.mark.parametrize("options", [("--sample", "2"), ("--sample", "0.1", "--evidence", "package")])
def test_what_makes_no_sense_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        main(["--backend", "evident", *options])
    assert "--sample" in capsys.readouterr().err
