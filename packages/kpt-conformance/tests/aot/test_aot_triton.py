"""Triton kernels compiled for every chip of NVIDIA and AMD: good ones pass, each mutant fails for its own fault."""

import pytest
from aot_backend import need

CHIPS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@pytest.fixture(scope="module")
def rows(matrix):
    need("triton")
    # No program but the first has a contract for every chip.
    return [row for row in matrix("aot_triton_kernels:ALL", *CHIPS) if "there is no contract for it" not in row.detail]


@pytest.fixture(scope="module")
def samples(rows):
    return [row for row in rows if row.program == "bf16"]


def only(rows, program, chip, configuration=None):
    (row,) = (r for r in rows if (r.program, r.chip) == (program, chip) and configuration in (None, r.configuration))
    return row


def test_every_chip_and_configuration_is_compiled(samples):
    assert {(row.chip, row.configuration) for row in samples} == {(c, t) for c in CHIPS for t in ("128x128", "64x64")}
    assert [row for row in samples if row.status != "ok"] == []


def test_rows_are_complete(samples):
    for row in samples:
        assert row.registers > 16
        assert (row.spills, row.detail, row.versions.keys()) == (0, "", {"triton"})
        assert 0 < row.shared_memory <= 227 * 1024
        assert 4 <= row.occupancy <= 64
    by_chip = {row.chip: row for row in samples if row.configuration == "128x128"}
    assert any(name.startswith("wgmma.mma_async") for name in by_chip["sm90"].instructions)
    assert any(name.startswith("tcgen05.mma") for name in by_chip["sm100"].instructions)
    assert any(name.startswith("v_mfma_f32") for name in by_chip["gfx942"].instructions)
    assert any(name.startswith("v_wmma_f32") for name in by_chip["gfx1201"].instructions)


def test_occupancy_by_hand(samples):
    row = only(samples, "bf16", "sm80", "128x128")
    # Blocks of 8 warps: one for its registers (65536 // (8 * 32 * 184)), though there is memory for two.
    assert (row.registers > 128, row.shared_memory, row.occupancy) == (True, 65536, 8)


def test_fp8_is_what_each_chip_has(rows):
    refused = only(rows, "fp8 e4m3fn", "sm80", "64x64")
    assert refused.status == "unsupported"
    assert "type fp8e4nv not supported in this architecture" in refused.detail
    assert only(rows, "fp8 e4m3fn", "sm89", "64x64").status == "ok"
    assert only(rows, "fp8 e4m3fn", "sm90", "128x128").status == "ok"
    assert only(rows, "fp8 e4m3fn", "gfx942").status == "not offered"
    assert only(rows, "fp8 e4m3fnuz", "gfx942", "128x128").status == "ok"


def test_descriptors_become_tma_and_warp_specialisation(rows):
    assert [only(rows, "bf16 by descriptors", chip).status for chip in ("sm90", "sm100")] == ["ok", "ok"]


def test_types_may_depend_on_the_configuration(rows):
    small, large = (only(rows, "copy by descriptors of the host", "sm90", block) for block in ("64", "128"))
    assert (small.status, large.status) == ("ok", "ok")
    assert 64 * 64 * 2 <= small.shared_memory < 128 * 64 * 2 <= large.shared_memory


@pytest.mark.parametrize(
    ("mutant", "chip", "said"),
    [
        ("spills", "sm90", "B of spills, but the contract says 'no spills'"),
        ("spills", "gfx942", "B of spills, but the contract says 'no spills'"),
        ("no dot", "sm90", "no wgmma in the code"),
        ("no dot", "gfx942", "no v_mfma of bf16 in the code; found: "),
        ("too much memory", "sm89", "needs 160.0 KiB of smem, but a block of sm89 has 99 KiB"),
        ("too much memory", "gfx942", "needs 192.0 KiB of lds, but a block of gfx942 has 64 KiB"),
        ("too much for contract", "sm90", "96.0 KiB, but the contract says 'smem <= 64 KiB'"),
        ("stale", "sm90", "the contract says that sm90 can't have it, but it compiles"),
    ],
)
def test_mutant_breaks_its_contract(rows, mutant, chip, said):
    row = only(rows, mutant, chip)
    assert row.status == "broken"
    assert said in row.detail


def test_wgmma_that_waits_for_registers_is_told(rows):
    assert "serialized" in only(rows, "spills", "sm90").detail


def test_wrong_declarations_are_rows(matrix):
    need("triton")
    rows = {row.program: row for row in matrix("aot_triton_kernels:WRONG", "sm90") if row.status == "error"}
    said = {
        "unknown clause": "'wgma' is no clause of a contract for sm90; did you mean 'wgmma'?",
        "unknown chip": "a contract is for an unknown chip 'sm9': did you mean 'sm90'",
        "no contract": "backend 'sample' claims sm90, but there is no contract for it",
        "unknown option": "'num_warp': did you mean 'num_warps'",
        "no fusion": "does not set enable_fp_fusion",
        "no type": "BLOCK_M of 'no type' has neither a type in the signature nor a value",
        "no configuration": "it has no configuration for sm90",
    }
    assert rows.keys() == said.keys()
    for name, sentence in said.items():
        assert sentence in rows[name].detail
