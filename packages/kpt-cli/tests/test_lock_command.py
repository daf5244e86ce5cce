"""`kpt lock` and `kpt doctor --lock`."""

import json

import pytest

import kpt_core
from cli_kernels import Backend
from kpt_core.registry import add_backend, remove_backend
from kpt_optimize.lock import read_lock, write_lock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kpt.lock"


def test_what_is_locked_is_what_runs(kpt, path):
    result = kpt("lock", "--output", path, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    for said in ("moe.experts", "moe.grouped_mm", "reference", "torch", "kpt-moe", f"Wrote {path}"):
        assert said in " ".join(result.stdout.split())
    locked = read_lock(path)
    assert {entry.op for entry in locked.entries} >= {"moe.experts", "moe.grouped_mm", "moe.grouped_mm_wgrad"}
    of_moe = [entry for entry in locked.entries if entry.op.startswith("moe.")]
    assert {(entry.distribution, entry.dtype) for entry in of_moe} == {("kpt-moe", "float32")}
    assert {entry.op: entry.kernel for entry in of_moe} == {
        "moe.experts": "torch/moe.experts/kpt_moe.torch_kernels.experts_loop:forward",
        "moe.grouped_mm": "torch/moe.grouped_mm/kpt_moe.torch_kernels.grouped_mm:loop",
        "moe.grouped_mm_wgrad": "torch/moe.grouped_mm_wgrad/kpt_moe.torch_kernels.grouped_mm:loop_wgrad",
        "moe.scaled_grouped_mm": "torch/moe.scaled_grouped_mm/kpt_moe.torch_kernels.scaled_grouped_mm:loop",
        "moe.top_k_gating": "reference",
    }
    same = kpt("doctor", "--lock", path)
    assert (same.exit_code, same.stdout) == (0, f"All is as in {path}.\n")
    assert json.loads(kpt("doctor", "--lock", path, "--json").stdout) == {
        "ok": True,
        "lock": str(path),
        "differences": [],
    }


def test_ops_without_cases_are_named(kpt, path):
    add_backend(Backend())
    try:
        result = kpt("lock", "--output", path, "--dtype", "float32")
    finally:
        remove_backend("clitest")
    assert "Not locked, for want of cases: clitest.double" in " ".join(result.stdout.split())


def test_a_difference_is_a_sentence_and_fails(kpt, path):
    double = kpt_core.get_op("clitest.double")
    import torch

    add_backend(Backend())
    try:
        with kpt_core.record() as log:
            double(torch.ones(8))
        write_lock(path, log)
        assert kpt("doctor", "--lock", path).exit_code == 0
    finally:
        remove_backend("clitest")
    result = kpt("doctor", "--lock", path)
    assert result.exit_code == 1
    sentence, verdict = result.stdout.splitlines()
    assert "cli_kernels:picky was locked, reference would run now because no installed backend offers" in sentence
    assert verdict == f"1 difference from {path}."
    document = json.loads(kpt("doctor", "--lock", path, "--json").stdout)
    assert (document["ok"], document["differences"]) == (False, [sentence])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no lock file at"),
        ("{", "is no lock file: it is not whole JSON"),
        ('{"format": 7}', "is no lock file: expected format 1, found 7"),
    ],
)
def test_a_file_that_can_not_be_used_ends_as_a_sentence(kpt, path, content, said):
    if content is not None:
        path.write_text(content)
    result = kpt("doctor", "--lock", path)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "`kpt lock" in result.stderr
    assert result.stdout == ""


def test_wrong_arguments_of_lock(kpt, tmp_path):
    for arguments, said in (
        (["--output", tmp_path / "none" / "kpt.lock"], "does not exist; make it first"),
        (["--dtype", "float33"], "unknown dtype 'float33'"),
        (["--device", "quantum"], "unknown device 'quantum'"),
    ):
        result = kpt("lock", *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_disk_that_refuses_is_told(kpt, tmp_path):
    result = kpt("lock", "--output", tmp_path, "--dtype", "float32")
    assert result.exit_code == 2
    assert str(tmp_path) in " ".join(result.stderr.split())
