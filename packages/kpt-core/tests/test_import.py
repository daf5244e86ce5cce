"""Importing the core is cheap: it brings torch, which is there anyway, and next to nothing else."""

import json
import os
import statistics
import subprocess
import sys

import pytest

import kpt_core

#: Prints what the import added, and how long it took.
SCRIPT = """
import json, sys, time
import torch
before = set(sys.modules)
begin = time.perf_counter()
import kpt_core
took = time.perf_counter() - begin
print(json.dumps({"seconds": took, "added": sorted(set(sys.modules) - before)}))
"""
RUNS = 3
#: A guard against importing something big by accident; 10 to 30 ms are usual.
LIMIT = 0.2


@pytest.fixture(scope="module")
def imports() -> list[dict[str, object]]:
    """What several fresh processes found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KPT_")}
    done = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=True)
        for _ in range(RUNS)
    ]
    assert [process.stderr for process in done] == [""] * RUNS
    return [json.loads(process.stdout) for process in done]


def test_nothing_but_the_core_and_the_standard_library_is_imported(imports: list[dict[str, list[str]]]) -> None:
    """Above all no triton, transformers, jax, pandas or numpy, no plug-in, and no part of torch that it loads late."""
    added = imports[0]["added"]
    assert "kpt_core._op" in added
    assert not {"kpt_core._lock", "kpt_core._optimize", "kpt_core._tuning_run"} & set(added), "rarely needed"
    foreign = {name.partition(".")[0] for name in added} - {"kpt_core"} - set(sys.stdlib_module_names)
    assert foreign == set()


def test_it_takes_milliseconds(imports: list[dict[str, float]], capsys: pytest.CaptureFixture[str]) -> None:
    seconds = statistics.median(found["seconds"] for found in imports)
    with capsys.disabled():
        print(f"\nimport kpt_core after torch: {seconds * 1e3:.0f} ms, median of {RUNS} processes")
    assert seconds < LIMIT


@pytest.mark.parametrize("name", kpt_core.__all__)
def test_what_is_offered_is_there(name: str) -> None:
    assert name in dir(kpt_core)
    assert getattr(kpt_core, name) is not None


def test_what_is_not_offered_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'kpt_core' has no attribute 'tunes'"):
        kpt_core.tunes  # type: ignore[attr-defined]  # noqa: B018
