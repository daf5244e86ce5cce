"""Reports that are forged, or were changed by hand, and what gives them away."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from kpt_conformance.doubts import GONE, doubts
from kpt_conformance.report import Report
from kpt_conformance.support import Claimed, contradictions

PASSED = {"passed": 9, "refused": 1, "skipped": 2, "failed": 0}
ON_A_CPU = "moe.experts kpt_backend_cpu.moe.decode:forward"
ON_A_GPU = "moe.experts kpt_triton.moe.experts:forward"
CLAIMS = [
    Claimed("moe.experts", "cpu", "kpt_backend_cpu.moe.decode:forward", ("cpu",), None),
    Claimed("moe.experts", "nvidia", "kpt_triton.moe.experts:forward", ("cuda",), None),
]


@pytest.fixture(autouse=True)
def vendors(monkeypatch) -> None:
    made = {
        "cpu": SimpleNamespace(name="cpu", device_types=("cpu",), chips=()),
        "nvidia": SimpleNamespace(name="nvidia", device_types=("cuda",), chips=("sm90",)),
    }
    monkeypatch.setattr("kpt_conformance.doubts.backends", lambda: made)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("repository")

    def git(*words: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(("git", "-C", folder, *name, *words), check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first", "--date=2026-11-20T08:00:00Z")
    return folder, git("rev-parse", "HEAD").strip()


def honest(commit: str) -> tuple[Report, Report, Report]:
    """A run on a CPU, one on a GPU, and a compilation."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = Report(
        date=now, commit=commit, backend="cpu", level="ran", chip="Intel Xeon (avx2)", device="cpu",
        selection="all", versions={"torch": "2.13.0+cpu"}, kernels={ON_A_CPU: {"float32": PASSED, "declared": PASSED}},
    )  # fmt: skip
    gpu = replace(
        run, backend="nvidia", chip="NVIDIA H200", device="cuda", versions={"torch": "2.13.0", "cuda": "13.0"},
        kernels={ON_A_GPU: {"bfloat16": PASSED}},
    )  # fmt: skip
    compiled = replace(gpu, level="compiled", chip="", device="", kernels={ON_A_GPU: {"sm90": PASSED}})
    return run, gpu, compiled


CPU, GPU, COMPILED = range(3)
FORGERIES = {
    "a CPU's torch on a GPU": (GPU, {"versions": {"torch": "2.13.0+cpu", "cuda": "13.0"}}, "runs nothing on cuda"),
    "no toolkit": (GPU, {"versions": {"torch": "2.13.0"}}, "without cuda or hip"),
    "another vendor's chip": (GPU, {"chip": "AMD Instinct MI300X"}, "no chip of backend nvidia"),
    "an invented chip": (GPU, {"chip": "Acme 9000"}, "no chip of backend nvidia"),
    "no chip": (GPU, {"chip": ""}, "no chip of backend nvidia"),
    "another device": (GPU, {"device": "cpu", "chip": "NVIDIA H200 (avx2)"}, "runs on cuda"),
    "an invented commit": (CPU, {"commit": "0123456789ab"}, "not in the history"),
    "no commit's name": (CPU, {"commit": "newest"}, "name of no commit"),
    "no commit": (CPU, {"commit": None}, "names no commit"),
    "changed files": (CPU, {"commit": "0123456789ab-dirty"}, "files differed"),
    "years to come": (CPU, {"date": "2031-01-01T00:00:00Z"}, "has not come yet"),
    "before its commit": (CPU, {"date": "2020-01-01T00:00:00Z"}, "before its commit"),
    "compiled made ran": (COMPILED, {"level": "ran", "chip": "NVIDIA H200", "device": "cuda"}, "dtypes as columns"),
    "ran made compiled": (GPU, {"level": "compiled", "chip": ""}, "chips as columns"),
    "compiled for another vendor": (COMPILED, {"kernels": {ON_A_GPU: {"gfx942": PASSED}}}, "not for gfx942"),
    "a CPU without its sets": (CPU, {"chip": "Intel Xeon"}, "instruction sets in brackets"),
    "interpreted on a GPU": (GPU, {"level": "interpreted"}, "interpreters run on a CPU"),
    "too many checks": (CPU, {"kernels": {ON_A_CPU: {"float32": {**PASSED, "passed": 99_999}}}}, "more checks"),
    "fewer than none": (CPU, {"kernels": {ON_A_CPU: {"float32": {**PASSED, "failed": -1}}}}, "fewer than none"),
    "a failure of nothing": (CPU, {"kernels": {ON_A_CPU: {"float32": {**PASSED, "failed": 1}}}}, "nothing is named"),
    "another backend's kernel": (CPU, {"kernels": {ON_A_GPU: {"float32": PASSED}}}, "has no kernel"),
    "an invented op": (CPU, {"kernels": {"moe.magic kpt_backend_cpu.moe:forward": {"float32": PASSED}}}, "no kernel"),
    "of nothing": (CPU, {"kernels": {}}, "of no kernel"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_report_is_told(repository, forgery):
    folder, commit = repository
    kind, changes, sentence = FORGERIES[forgery]
    assert any(sentence in doubt for doubt in doubts(replace(honest(commit)[kind], **changes), CLAIMS, folder))


def test_nothing_speaks_against_honest_reports(repository):
    folder, commit = repository
    for report in honest(commit):
        assert list(doubts(report, CLAIMS, folder)) == []


def test_a_commit_that_is_known_to_be_gone_is_no_news(repository):
    folder, commit = repository
    (folder / "a.json").write_text(replace(honest(commit)[CPU], commit="0123456789ab").dumps())
    assert ["not in the history" in each for each in contradictions(folder, CLAIMS)] == [True]
    (folder / GONE).write_text("a.json\n")
    assert list(contradictions(folder, CLAIMS)) == []
