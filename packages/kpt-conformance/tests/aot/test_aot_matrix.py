"""What does not need a compiler: declarations, missing packages."""

import sys
from importlib.util import find_spec

import pytest
from aot_backend import SampleBackend, need

import kpt_core
from kpt_conformance.aot import CHIPS, run
from kpt_core import registry


def test_chips_of_the_design_are_known():
    nvidia = {"sm80", "sm86", "sm89", "sm90", "sm100", "sm120"}
    amd = {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"}
    assert CHIPS.keys() == nvidia | amd | {"pvc", "bmg_g21"} | {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert {chip.name for chip in CHIPS.values() if chip.warp == 64} == {"gfx90a", "gfx942", "gfx950"}


@pytest.mark.parametrize(
    ("aot", "chips", "said"),
    [
        ("aot_pallas_kernels:SAMPLE", (), "backend 'sample' does not say for which chips it is"),
        ("aot_pallas_kernels:SAMPLE", ("v5",), "unknown chip 'v5': did you mean"),
        (
            "aot_pallas_kernels:SAMPLE",
            ("sm90",),
            "claims sm90, but there is no contract for it; add one to the program",
        ),
        (
            "aot_pallas_kernels:NOTHING",
            ("v5e",),
            "AttributeError: module 'aot_pallas_kernels' has no attribute 'NOTHING'",
        ),
        ("aot_nowhere:SAMPLE", ("v5e",), "ModuleNotFoundError: No module named 'aot_nowhere'"),
        ("aot_pallas_kernels:_CHIPS", ("v5e",), "'v4' is no program; expected an object that has name, contracts"),
        ("aot_pallas_kernels:TWICE", ("v5e",), "programs of the names ['matmul', 'matmul']"),
    ],
)
def test_wrong_declaration_is_a_row(matrix, aot, chips, said):
    rows = matrix(aot, *chips)
    assert {row.status for row in rows} == {"error"}
    assert any(said in row.detail for row in rows), [row.detail for row in rows]


def test_names_that_are_not_there_raise(matrix):
    with pytest.raises(kpt_core.UnknownNameError, match="unknown chip 'sm91': did you mean 'sm90'"):
        matrix("aot_pallas_kernels:SAMPLE", "v5e", chips=["sm91"])
    with pytest.raises(kpt_core.UnknownNameError, match="unknown backend 'sampel'"):
        run(backends=["sampel"])


def test_only_the_chips_asked_for(matrix):
    (row,) = matrix("aot_pallas_kernels:NOT_OFFERED", "v5e", "v4", chips=["v4"])
    assert (row.chip, row.status, row.detail) == ("v4", "not offered", "it is too small")


def test_without_triton_nothing_is_green(matrix, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "aot_triton_kernels", raising=False)
    (row,) = matrix("aot_triton_kernels:BF16", "sm90")
    assert row.status == "error"
    assert row.detail == "not compiled: triton is not installed; pip install './packages/kpt-conformance[triton]'"


@pytest.mark.skipif(find_spec("jax") is not None, reason="jax is installed here")
def test_without_jax_nothing_is_green(matrix):
    (row,) = matrix("aot_pallas_kernels:SAMPLE", "v5e")
    assert row.status == "error"
    assert row.detail == "not compiled: jax is not installed; pip install './packages/kpt-conformance[tpu]'"


def test_interpreter_is_no_compiler(matrix, monkeypatch):
    need("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "aot_triton_kernels", raising=False)
    rows = matrix("aot_triton_kernels:ONE", "sm80")
    monkeypatch.delitem(sys.modules, "aot_triton_kernels")
    assert [row.status for row in rows] == ["error"]
    assert "unset TRITON_INTERPRET" in rows[0].detail


def test_backend_that_tells_no_kernels_is_a_row():
    class Broken(SampleBackend):
        def kernels(self):
            raise RuntimeError("no driver")

    registry.add_backend(Broken((), ("sm90",)))
    try:
        (row,) = run(backends=["sample"])
    finally:
        registry.remove_backend("sample")
    assert (row.status, row.detail) == ("error", "kernels() of backend 'sample' raised RuntimeError: no driver")


def test_backend_without_aot_is_left_alone():
    registry.add_backend(SampleBackend((), ("sm90",)))
    try:
        assert run(backends=["sample"]) == []
    finally:
        registry.remove_backend("sample")
