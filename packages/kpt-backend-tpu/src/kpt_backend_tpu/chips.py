"""Google's TPUs by the name of their chip: how they are recognised, what they can do, and their peaks.

Chips are told by their number on the PCI bus, so that nothing is imported and no TPU is claimed. Numbers of each core
are those of JAX (`jax.experimental.pallas.tpu.get_tpu_info`), peaks those of Google Cloud's pages on each version. One
device is one chip, but on TPU7x, where it is one of the chip's two halves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kpt_core import Capability
from kpt_optimize.devices.products import PRODUCTS as ALL_PRODUCTS

MIB = 2**20
_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What kernels are fitted to.

    Attributes:
        pci: its number on the PCI bus, as the kernel writes it.
        vmem: bytes of memory that a core's kernels manage themselves.
        mxu: rows and columns of a matrix unit.
        mxus: matrix units of a core.
        cores: of a device.
        int8_tops: products of 8-bit integers of a device, 10**12 operations a second; None if the chip has none.
        own: what it can do that not all can.
    """

    pci: str
    vmem: int
    mxu: int
    mxus: int
    cores: int
    int8_tops: float | None = None
    own: frozenset[Capability] = frozenset()


_INT8 = frozenset({"int8"})
#: By the name that kernels are compiled for.
TPUS = {
    "v4": Chip(pci="0x005e", vmem=16 * MIB, mxu=128, mxus=4, cores=2),
    "v5e": Chip(pci="0x0063", vmem=128 * MIB, mxu=128, mxus=4, cores=1, int8_tops=394, own=_INT8),
    "v5p": Chip(pci="0x0062", vmem=64 * MIB, mxu=128, mxus=4, cores=2, int8_tops=918, own=_INT8),
    # v6e takes FP8, at the rate of bfloat16: that is no FP8 unit.
    "v6e": Chip(pci="0x006f", vmem=128 * MIB, mxu=256, mxus=2, cores=1, int8_tops=1836, own=_INT8),
    "tpu7x": Chip(
        pci="0x0076", vmem=64 * MIB, mxu=256, mxus=2, cores=1, own=frozenset({"fp8_e4m3fn", "fp8_e5m2"})
    ),
}  # fmt: skip
#: What kernels are compiled for.
CHIPS = tuple(TPUS)

#: By the name that JAX gives.
PRODUCTS = ALL_PRODUCTS["tpu"]


def properties_of(product: str, chip: str) -> Any:
    """Return what the backend knows of a device, here or not: its product and its chip."""
    return SimpleNamespace(name=product, chip=chip)


def product_of(chip: str) -> str:
    """Return the product with a chip, as JAX names it; the chip where none is listed."""
    return next((name for name, peaks in PRODUCTS.items() if peaks.chip == chip), chip)


def unsupported(chip: str) -> str | None:
    """Return why a chip is not served, as a sentence, or None."""
    if chip in TPUS:
        return None
    return f"{chip} is not supported: KPT's kernels are compiled and checked for {', '.join(CHIPS)}"


def capabilities_of(chip: str) -> frozenset[Capability]:
    """Return what a chip can do, in KPT's words, with its own name; that alone for one that is not served."""
    if chip not in TPUS:
        return frozenset({chip})
    return TPUS[chip].own | {"tpu", "mxu", "bf16", chip}


def attached(devices: Path | None = None) -> tuple[str, ...]:
    """Return the chips on this machine's PCI bus, `unknown` for one of Google's that is not listed; asks no driver."""
    return tuple(_found(_PCI if devices is None else devices))


def _found(devices: Path) -> Iterator[str]:
    names = {chip.pci: name for name, chip in TPUS.items()}
    for vendor in sorted(devices.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            number = vendor.with_name("device").read_text().strip()
            # Google's network interface (gVNIC) has its vendor's number too.
            if number in names:
                yield names[number]
            elif number in ("0x0027", "0x0056"):
                yield {"0x0027": "v2 or v3", "0x0056": "unknown"}[number]
