"""Facts of a chip by its name: which ones kernels are compiled for, which are alike, what they can't read."""

from functools import cache

import torch

#: What kernels are compiled for, by vendor. Of Intel's: Data Center GPU Max and Arc B.
NVIDIA = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
INTEL = ("pvc", "bmg_g21")
#: Chips that are alike in what decides about tiles, by the first of them.
FAMILIES = ("sm80", "sm86", "sm90", "sm100", "sm120", "gfx9", "gfx11", "xe")
#: Stands for the chip where kernels are interpreted.
INTERPRETER = "interpreter"
#: What a block of threads has, as contracts write it.
MEMORY = {
    "sm80": "smem <= 163 KiB",
    "sm86": "smem <= 99 KiB",
    "sm89": "smem <= 99 KiB",
    "sm90": "smem <= 227 KiB",
    "sm100": "smem <= 227 KiB",
    "sm120": "smem <= 99 KiB",
    "gfx90a": "lds <= 64 KiB",
    "gfx942": "lds <= 64 KiB",
    "gfx950": "lds <= 160 KiB",
    "gfx1100": "lds <= 64 KiB",
    "gfx1201": "lds <= 64 KiB",
    "pvc": "slm <= 128 KiB",
    "bmg_g21": "slm <= 128 KiB",
}

#: Version of the graphics architecture, which the number that the SYCL runtime, and with it `torch.xpu`, gives one
#: begins with -> the name that Intel's compilers have for the chip
#: (sycl_ext_oneapi_device_architecture).
_NAMES = {
    (12, 55): "acm_g10", (12, 56): "acm_g11", (12, 57): "acm_g12",
    (12, 60): "pvc", (12, 61): "pvc_vg",
    (12, 70): "mtl_u", (12, 71): "mtl_h", (12, 74): "arl_h",
    (20, 1): "bmg_g21", (20, 2): "bmg_g31", (20, 4): "lnl_m",
}  # fmt: skip
#: Chips whose units for 8-bit numbers add with fewer bits than float32 has: 13 on sm89 and sm90 (SageAttention2,
#: arXiv:2411.10958), 25 on sm100 (DeepGEMM's issue 176). Nobody told of sm120, so it counts as one of them.
SHORT_SUMS = ("sm89", "sm90", "sm120")
_OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SMALL_MEMORY = ("sm86", "sm87", "sm89")


def family_of(chip: str) -> str:
    """The family of a chip such as `sm89` or `gfx942`; sm80's where it is unknown, which needs least of a chip."""
    if is_intel(chip):
        return "xe"
    if chip.startswith("gfx"):
        return "gfx9" if chip.startswith("gfx9") else "gfx11"
    if chip in _SMALL_MEMORY:
        return "sm86"
    if chip.startswith(("sm10", "sm11", "sm12")):
        return "sm120" if chip.startswith("sm12") else "sm100"
    return chip if chip in FAMILIES else "sm80"


@cache
def chip_of(device: torch.device) -> str:
    """Return the chip of a device: `sm90`, `gfx942`, `pvc`; `interpreter` where kernels are not compiled."""
    from kpt_triton.numeric import INTERPRETED  # backends import this module where Triton may be missing

    if device.type not in ("cuda", "xpu") or INTERPRETED.value:
        return INTERPRETER
    properties = torch.get_device_module(device).get_device_properties(device)
    if device.type == "xpu":
        return intel_chip(properties.architecture)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def converts_codes(chip: str) -> bool:
    """Return whether a chip converts float8_e4m3fn and float8_e5m2 itself; elsewhere integers widen them."""
    if chip.startswith("sm"):
        return int(chip[2:]) >= 89
    # gfx942 has the fnuz forms alone; CDNA2 and RDNA3 have none; on Intel's nobody saw it work.
    return chip == INTERPRETER or chip.startswith(("gfx95", "gfx12"))


def no_codes(device: torch.device, dtype: torch.dtype, codes: torch.dtype) -> str | None:
    """Return why 8-bit numbers can't be multiplied beside a type, or None."""
    if codes is torch.float8_e5m2 and dtype is torch.float16 and chip_of(device) == "gfx90a":
        return "e5m2 beside float16 on gfx90a, whose products take the small numbers of float16 for zeros"
    return None


def multiplied(chip: str) -> tuple[torch.dtype, ...]:
    """Return the 8-bit types that a chip's matrix units multiply as they are; the interpreter has all."""
    if chip == INTERPRETER:
        return (*_OCP, *_FNUZ)
    if chip.startswith("sm"):
        return _OCP if int(chip[2:]) >= 89 else ()
    if chip == "gfx942":
        return _FNUZ
    return _OCP if chip.startswith(("gfx95", "gfx12")) else ()


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
