"""Chips by compute capability."""

import re

import pytest

from kpt_backend_nvidia import BACKEND
from kpt_backend_nvidia.chips import (
    CHIPS,
    capabilities_of,
    chip_name,
    compute_capability,
    generation,
    peaks_of,
    unsupported,
)
from kpt_core import UnknownNameError

BASE = {"cuda", "fp16", "bf16", "tf32", "cp_async", "mma_sync"}
FP8 = {"fp8_e4m3fn", "fp8_e5m2"}
HOPPER = BASE | FP8 | {"tma", "clusters"}
BLOCK_SCALED = {"mxfp8", "nvfp4"}

FEATURES = {
    (8, 0): BASE | {"sm80"},
    (8, 6): BASE | {"sm80", "sm86"},
    (8, 7): BASE | {"sm87"},  # Orin, integrated: discrete GPUs' machine code does not run there
    (8, 9): BASE | FP8 | {"sm80", "sm89"},
    (9, 0): HOPPER | {"wgmma", "sm90"},
    (10, 0): HOPPER | BLOCK_SCALED | {"tcgen05", "sm100"},
    (10, 3): HOPPER | BLOCK_SCALED | {"tcgen05", "sm100", "sm103"},
    (11, 0): HOPPER | BLOCK_SCALED | {"tcgen05", "sm110"},
    (12, 0): HOPPER | BLOCK_SCALED | {"sm120"},
    (12, 1): HOPPER | BLOCK_SCALED | {"sm120", "sm121"},
    (13, 0): HOPPER | {"sm130"},  # not known: what stays in every chip, and nothing of a family's
}


@pytest.mark.parametrize(("capability", "features"), FEATURES.items(), ids=[chip_name(c) for c in FEATURES])
def test_a_chip_offers_what_its_generation_has(capability, features):
    assert capabilities_of(capability) == features
    assert unsupported(capability) is None


@pytest.mark.parametrize(("capability", "name"), [((7, 0), "Volta"), ((7, 5), "Turing"), ((6, 1), "Pascal")])
def test_a_chip_before_ampere_offers_nothing_and_a_sentence_says_why(capability, name):
    major, minor = capability
    assert capabilities_of(capability) == {f"sm{major}{minor}"}
    sentence = unsupported(capability)
    assert sentence is not None
    assert f"{major}.{minor}" in sentence
    assert name in sentence
    assert "8.0" in sentence


def test_compiled_for_are_supported_chips_and_names_go_both_ways():
    for chip in CHIPS:
        assert chip_name(compute_capability(chip)) == chip
        assert unsupported(compute_capability(chip)) is None
    assert compute_capability("sm120") == (12, 0)


@pytest.mark.parametrize("wrong", ["sm9", "gfx942", "90", "sm_90", ""])
def test_a_name_that_is_no_chip_is_refused(wrong):
    with pytest.raises(UnknownNameError, match="unknown chip"):
        compute_capability(wrong)


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 6), "Ampere"), ((8, 9), "Ada"), ((9, 0), "Hopper"), ((12, 1), "Blackwell")]
)
def test_generations(capability, name):
    assert generation(capability) == name


def test_peaks_are_dense_figures_of_the_named_product_alone():
    h100, pcie = peaks_of("NVIDIA H100 80GB HBM3"), peaks_of("NVIDIA H100 PCIe")
    assert h100 is not None
    assert pcie is not None
    # 132 SMs, 4 tensor cores of 512 fused multiply-adds, 1830 MHz.
    assert h100.bf16_tflops == pytest.approx(132 * 4 * 512 * 2 * 1830e6 / 1e12, rel=0.01)
    # 114 SMs, 1620 MHz.
    assert pcie.bf16_tflops == pytest.approx(114 * 4 * 512 * 2 * 1620e6 / 1e12, rel=0.01)
    assert re.search("data sheet", h100.source)
    for other in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "Quadro P400", ""):
        assert peaks_of(other) is None


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 5120 / 8 * 1215e6 * 2 / 1e9),  # HBM2e: bits, clock, two a clock
        ("NVIDIA A10G", 384 / 8 * 12.5),  # GDDR6: bits, Gbit/s a pin
        ("NVIDIA L4", 192 / 8 * 12.5),
        ("NVIDIA L40S", 384 / 8 * 18),
        ("NVIDIA GeForce RTX 4090", 384 / 8 * 21),
        ("NVIDIA GeForce RTX 5090", 512 / 8 * 28),
    ],
)
def test_bandwidth_is_width_times_rate_of_the_memory(name, bandwidth):
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.bandwidth == pytest.approx(bandwidth, rel=0.005)


def test_chips_that_are_not_here_are_described_and_each_has_a_product():
    assert {peaks.chip for peaks in BACKEND.products.values()} == set(CHIPS)
    for name, peaks in BACKEND.products.items():
        told = BACKEND.describe(BACKEND.properties_of(name, peaks.chip))
        assert (told["chip"], told["unsupported"], told["peaks"]) == (peaks.chip, None, peaks)
        assert (peaks.fp8_tflops is not None) == ("fp8_e4m3fn" in told["capabilities"])
