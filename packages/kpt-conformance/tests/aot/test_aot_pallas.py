"""Pallas kernels compiled for every TPU: good ones pass, each mutant fails for its own fault."""

import pytest
from aot_backend import need

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


@pytest.fixture(autouse=True)
def _compilers():
    need("jax", "libtpu")


@pytest.fixture(scope="module")
def mutants(matrix):
    need("jax", "libtpu")
    return {row.program: row for row in matrix("aot_pallas_kernels:MUTANTS", "v5e")}


def test_sample_is_compiled_for_every_tpu(matrix):
    rows = matrix("aot_pallas_kernels:SAMPLE", *TPUS)
    assert [(row.chip, row.status) for row in rows] == [(chip, "ok") for chip in TPUS]
    for row in rows:
        # Two inputs and one output of 256 x 256 bfloat16, each twice for the pipeline, and the accumulator.
        assert row.shared_memory == 6 * 256 * 256 * 2 + 256 * 256 * 4
        assert row.instructions["tpu_custom_call"] == 1
        assert sum(number for name, number in row.instructions.items() if name.startswith("vmatmul")) >= 8
        assert (row.spills, row.versions.keys()) == (0, {"jax", "jaxlib", "libtpu"})


@pytest.mark.parametrize(
    ("mutant", "status", "said"),
    [
        ("too much for contract", "broken", "1024.0 KiB, but the contract says 'vmem <= 512 KiB'"),
        ("too much for chip", "error", "Ran out of memory in memory space vmem"),
        ("no matrix unit", "broken", "no mxu in the code"),
        ("spills", "broken", "B of spills, but the contract says 'no spills'"),
    ],
)
def test_mutant_breaks_its_contract(mutants, mutant, status, said):
    assert mutants[mutant].status == status
    assert said in mutants[mutant].detail


def test_compiler_that_crashes_is_told_and_costs_the_others_nothing(matrix):
    crashed, other = matrix("aot_pallas_kernels:CRASH", "v6e")
    assert (crashed.program, crashed.status) == ("crash", "error")
    assert "the compiler crashed" in crashed.detail
    assert (other.program, other.status) == ("other", "ok")
