"""`ROCmCompiler` by the real Triton, for chips that are not here."""

import pytest
import triton
import triton.language as tl

from kpt_backend_amd import CHIPS, ROCmCompiler
from kpt_core import InputError, UnknownNameError
from kpt_triton.numeric import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED.value, reason="kernels are interpreted in this process")


@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    place = rows * n + columns
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


TYPES = {"x": "*bf16:16", "y": "*bf16:16", "out": "*fp32:16", "n": "i32:16"}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_product_becomes_matrix_instructions_without_spills_on_every_chip(chip):
    found = ROCmCompiler(chip).compile(product, TYPES, {"BLOCK": 64})
    assert (found.chip, found.matrix, found.spills) == (chip, True, 0)
    assert found.registers > 0
    assert 0 < found.lds <= 64 * 1024
    assert ("v_mfma" if chip.startswith("gfx9") else "v_wmma") in found.assembly


def test_options_change_the_code_and_the_cache_answers_the_second_time(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = ROCmCompiler("gfx942", matrix_instr_nonkdim=16)
    small = compiler.compile(product, TYPES, {"BLOCK": 64})
    large = compiler.compile(product, TYPES, {"BLOCK": 64}, matrix_instr_nonkdim=32)
    assert "16x16x" in small.assembly
    assert "32x32x" in large.assembly
    again = compiler.compile(product, TYPES, {"BLOCK": 64})
    assert again.assembly == small.assembly
    assert again.seconds < small.seconds / 4
    assert compiler.compiled == [small, large, again]


def test_wrong_chips_options_and_arguments_are_named():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'gfx942'"):
        ROCmCompiler("gfx940")
    with pytest.raises(UnknownNameError, match="waves_per_eu"):
        ROCmCompiler("gfx942", waves_per_cu=2)
    with pytest.raises(InputError, match=r"matrix_instr_nonkdim must be one of \[0, 16, 32\]; got 8"):
        ROCmCompiler("gfx942", matrix_instr_nonkdim=8)
    with pytest.raises(InputError, match="for MFMA; gfx1100 has WMMA"):
        ROCmCompiler("gfx1100", kpack=2)
    with pytest.raises(InputError, match="parameter BLOCK of product has neither type nor value"):
        ROCmCompiler("gfx942").compile(product, TYPES)
    with pytest.raises(UnknownNameError, match="parameter of product"):
        ROCmCompiler("gfx942").compile(product, {**TYPES, "z": "i32"}, {"BLOCK": 64})
