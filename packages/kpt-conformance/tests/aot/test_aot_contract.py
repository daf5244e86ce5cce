"""Contracts: what they mean, and what is said of those that can't be read."""

import pytest

from kpt_conformance.aot import CHIPS, ContractError, Reading, parse_contract
from kpt_conformance.aot.gpus import spills_of_hot_loop

HOPPER = Reading(
    registers=168,
    spills=0,
    hot=8,
    shared_memory=200 * 1024,
    occupancy=16,
    instructions={"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 8, "cp.async.bulk.tensor.2d": 3},
)
MI200 = Reading(registers=200, spills=16, instructions={"v_mfma_f32_32x32x8f16": 4, "v_mfma_f32_32x32x8bf16_1k": 2})


def breaches(text: str, reading: Reading, chip: str) -> list[str]:
    return parse_contract(text, CHIPS[chip]).breaches(reading)


@pytest.mark.parametrize(
    "text",
    [
        "wgmma, tma, no spills, smem <= 227 KiB, registers <= 168, occupancy >= 16",
        "wgmma of bf16, no wgmma of f16, no wgmma of e4m3",
        "no cp.async, no setmaxnreg",
        "smem <= 204800 B, spills <= 0 B",
        "smem <= 1 MiB",
        "hot <= 8 B",
    ],
)
def test_code_that_keeps_the_contract(text):
    assert breaches(text, HOPPER, "sm90") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcgen05", "no tcgen05 in the code; found: wgmma"),
        ("wgmma of e4m3", "no wgmma of e4m3 in the code"),
        ("no tma", "3 tma in the code, none was allowed"),
        ("smem <= 199 KiB", "200.0 KiB, but the contract says 'smem <= 199 KiB'"),
        ("registers <= 167", "registers 168, but the contract says"),
        ("hot <= 4 B", "8 B of spills in the shortest loop of products, but the contract says 'hot <= 4 B'"),
        ("occupancy >= 17", "occupancy 16, but the contract says"),
    ],
)
def test_code_that_breaks_the_contract(text, said):
    (breach,) = breaches(text, HOPPER, "sm90")
    assert said in breach


#: A loop around two with products, of which the shorter one loads 12 bytes; and one without products.
SASS = """
.L_x_1:
        /*0000*/                   LDL R1, [R1] ;
.L_x_2:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
        /*0020*/                   LDL.64 R2, [R1+0x8] ;
        /*0030*/                   STL [R1+0x10], R9 ;
        /*0040*/              @P0  BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
        /*0060*/                   LDL.128 R2, [R1+0x8] ;
        /*0070*/                   LDL.128 R2, [R1+0x8] ;
        /*0080*/                   LDL.128 R2, [R1+0x8] ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
        /*00a0*/              @P1  BRA `(.L_x_1) ;
.L_x_4:
        /*00b0*/                   STL [R1+0x10], R9 ;
        /*00c0*/              @P1  BRA `(.L_x_4) ;
        /*00d0*/                   BRA `(.L_x_5) ;
.L_x_5:
        /*00e0*/                   EXIT ;
"""


def test_spills_are_those_of_the_shortest_innermost_loop_with_products():
    assert spills_of_hot_loop(SASS) == 12
    assert spills_of_hot_loop(SASS.replace("HGMMA", "HMMA").replace("LDL.64", "MOV")) == 4
    assert spills_of_hot_loop(SASS.replace("HGMMA", "FFMA")) == 0


def test_every_breach_is_told():
    assert len(breaches("v_mfma, no v_mfma of f16, no spills, registers <= 128", MI200, "gfx90a")) == 3


def test_types_are_told_apart_in_the_names_of_amd():
    assert breaches("v_mfma of f16, v_mfma of bf16", MI200, "gfx90a") == []
    only_bf16 = Reading(instructions={"v_mfma_f32_32x32x8bf16_1k": 2})
    assert breaches("no v_mfma of f16", only_bf16, "gfx90a") == []


def test_number_that_is_not_known_keeps_no_bound():
    (breach,) = breaches("no spills", Reading(), "sm90")
    assert "can't be checked" in breach


def test_serialised_wgmma_breaks_the_contract():
    note = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    slow = Reading(instructions=HOPPER.instructions, notes=(note,))
    assert breaches("wgmma", slow, "sm90") == [note]
    assert breaches("tma", slow, "sm90") == []


def test_reasons():
    assert (
        parse_contract("unsupported: fp8, e4m3fn, needs sm89", CHIPS["sm80"]).unsupported == "fp8, e4m3fn, needs sm89"
    )
    assert parse_contract("not offered: too slow", CHIPS["sm80"]).not_offered == "too slow"


@pytest.mark.parametrize(
    ("text", "chip", "message"),
    [
        ("wgma", "sm90", r"'wgma' is no clause of a contract for sm90; did you mean 'wgmma'\? Known: .*wgmma"),
        ("no spill", "sm90", r"did you mean 'no spills'"),
        ("v_mfma", "sm90", r"'v_mfma' is no clause of a contract for sm90"),
        ("", "sm90", r"'' is no clause"),
        ("wgmma,", "sm90", r"'' is no clause"),
        (
            "lds <= 64 KiB",
            "sm90",
            r"'lds <= 64 KiB' is no bound of a contract for sm90, where there are .*smem <= N KiB",
        ),
        ("occupancy <= 4", "sm90", r"is no bound .* occupancy >= N"),
        ("registers <= 4", "v5e", r"is no bound .* vmem <= N KiB"),
        ("smem <= 64", "sm90", r"expected one of B, KiB, MiB behind the number; got 'none'"),
        ("smem <= 64 KB", "sm90", r"expected one of B, KiB, MiB behind the number; got 'KB'"),
        ("registers <= 64 KiB", "sm90", r"expected no unit; got 'KiB'"),
        ("unsupported", "sm90", r"gives no reason; write 'unsupported: reason'"),
        ("not offered:", "sm90", r"gives no reason"),
    ],
)
def test_contract_that_cannot_be_read(text, chip, message):
    with pytest.raises(ContractError, match=message):
        parse_contract(text, CHIPS[chip])


@pytest.mark.parametrize(
    ("reading", "chip", "said"),
    [
        (Reading(shared_memory=228 * 1024), "sm90", "needs 228.0 KiB of smem, but a block of sm90 has 227 KiB"),
        (Reading(shared_memory=65 * 1024), "gfx942", "needs 65.0 KiB of lds"),
        (Reading(tensor_memory=1024), "sm100", "1024 columns of tensor memory"),
        (Reading(occupancy=0, warps=32, registers=255), "sm90", "32 warps of 255 registers do not fit"),
        (Reading(shared_memory=227 * 1024, tensor_memory=512, occupancy=4), "sm100", None),
        (Reading(shared_memory=1 << 30), "v5e", None),
    ],
)
def test_what_a_driver_would_refuse(reading, chip, said):
    refusal = reading.launch_refusal(CHIPS[chip])
    assert (refusal is None) if said is None else (said in refusal)
