"""Intel's chips, by the number that the SYCL runtime, and with it `torch.xpu`, gives an architecture."""

#: Version of the graphics architecture -> the name that Intel's compilers have for the chip
#: (sycl_ext_oneapi_device_architecture).
_NAMES = {
    (12, 55): "acm_g10", (12, 56): "acm_g11", (12, 57): "acm_g12",
    (12, 60): "pvc", (12, 61): "pvc_vg",
    (12, 70): "mtl_u", (12, 71): "mtl_h", (12, 74): "arl_h",
    (20, 1): "bmg_g21", (20, 2): "bmg_g31", (20, 4): "lnl_m",
}  # fmt: skip
#: What kernels are compiled for: Data Center GPU Max and Arc B.
CHIPS = ("pvc", "bmg_g21")


def intel_chip(architecture: int) -> str:
    """Return the name of a chip, as in `pvc` for 0x30f000700; `xe_` and the version for one that is not listed."""
    version = architecture >> 8
    major, minor = version >> 22, version >> 14 & 0xFF
    return _NAMES.get((major, minor), f"xe_{major}_{minor}")


def architecture_of(chip: str) -> int:
    """Return the number of a chip that is listed: the reverse of `intel_chip`."""
    major, minor = next(version for version, name in _NAMES.items() if name == chip)
    return (major << 22 | minor << 14) << 8


def is_intel(chip: str) -> bool:
    """Return whether a chip's name is one of Intel's."""
    return chip in _NAMES.values() or chip.startswith("xe_")
