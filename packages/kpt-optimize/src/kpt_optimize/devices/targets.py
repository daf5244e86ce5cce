"""Devices that are not here: what their chips can do, and the kernels that would run there."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kpt_core import registry
from kpt_core.contract import TORCH, Backend, Call, Capability, Kernel, Op
from kpt_core.dispatch.candidates import candidate_of
from kpt_core.errors import UnknownNameError
from kpt_core.selection import Refused

from .backend import AcceleratorBackend
from .facts import Peaks
from .products import PRODUCTS

#: The processor of this machine, which needs no name.
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device to plan for.

    Attributes:
        chip: for instance `gfx942`.
        product: a usual one with this chip, by the name that the driver gives; the chip where none is listed.
        device_type: torch's; `meta` where the backend is missing.
        backend: whose kernels run there; None where no vendor's is installed.
        unsupported: why KPT's kernels don't run on it, None if they do.
        peaks: of the product; None if they are not known.
        missing: the package whose kernels would run there, where it is not installed; else None.
    """

    chip: str
    product: str
    device_type: str
    backend: Backend | None
    capabilities: frozenset[Capability]
    unsupported: str | None
    peaks: Peaks | None
    missing: str | None = None

    @property
    def memory(self) -> int | None:
        """Return the bytes of its memory, None if they are not known."""
        if self.device_type == CPU:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return None if self.peaks is None else self.peaks.memory * 1024**3

    def tflops(self, dtype: str) -> float | None:
        """Return the rate of products in a dtype, None if it is not known; 8-bit weights are converted at worst.

        Which 8-bit formats a chip multiplies is its backend's to know; without it the best of them counts.
        """
        if self.peaks is None or dtype == "float32":
            return None
        if self.missing is not None and dtype.startswith("float8") and self.peaks.fp8_tflops is not None:
            return self.peaks.fp8_tflops
        if dtype.replace("float8", "fp8") in self.capabilities:
            return self.peaks.fp8_tflops
        return self.peaks.bf16_tflops


def _vendors() -> Iterator[tuple[str, Mapping[str, Peaks], AcceleratorBackend | None]]:
    """Yield vendors: name of the backend, products, and the backend itself, None where it is not installed."""
    installed = {name: each for name, each in registry.backends().items() if isinstance(each, AcceleratorBackend)}
    for name, backend in installed.items():
        yield name, backend.products, backend
    for name, products in PRODUCTS.items():
        if name not in installed:
            yield name, products, None


def chips() -> dict[str, AcceleratorBackend | None]:
    """Return every known chip and its vendor's backend, None where that is not installed."""
    found: dict[str, AcceleratorBackend | None] = {}
    for _, products, backend in _vendors():
        listed = () if backend is None else backend.chips
        found |= dict.fromkeys((*listed, *(each.chip for each in products.values())), backend)
    return found


def target_of(name: str) -> Target:
    """Return the device of a chip's name, or of words of a product's, as in `gfx942`, `MI300X` or `arc b580`.

    Raises:
        UnknownNameError: nobody knows it; the message offers close names.
    """
    wanted = name.lower()
    if wanted == CPU:
        return _this_processor()
    words = wanted.split()
    matches = [
        (vendor, product, peaks.chip, backend, peaks)
        for vendor, products, backend in _vendors()
        for product, peaks in products.items()
        if peaks.chip == wanted or (words and all(word in product.lower() for word in words))
    ]
    # Whole words first: an A10 is no A100.
    for match in sorted(matches, key=lambda match: not {*words} <= {match[2], *match[1].lower().split()}):
        return _described(*match)
    for vendor, _, backend in _vendors():
        if backend is not None and wanted in backend.chips:
            return _described(vendor, wanted, wanted, backend, None)
    raise UnknownNameError(
        "target", wanted, _names(), f"(a chip, as gfx942; words of a product, as MI300X or 'arc b580'; or {CPU})"
    )


def _names() -> set[str]:
    """Return what is offered for a name that nobody knows: chips, and the words of products that tell one."""
    words = {word for _, products, _ in _vendors() for product in products for word in product.lower().split()}
    return {CPU, *chips(), *(each for each in words if each[0].isalpha() and each.isalnum() and not each.isalpha())}


def _described(vendor: str, product: str, chip: str, backend: AcceleratorBackend | None, peaks: Peaks | None) -> Target:
    if backend is None:
        return Target(
            chip=chip,
            product=product,
            device_type="meta",
            backend=None,
            capabilities=frozenset(),
            unsupported=None,
            peaks=peaks,
            missing=f"kpt-backend-{vendor}",
        )
    told = backend.describe(backend.properties_of(product, chip))
    facts = {each: told[each] for each in ("capabilities", "unsupported", "peaks")}
    return Target(chip=chip, product=product, device_type=backend.device_types[0], backend=backend, **facts)


def _this_processor() -> Target:
    device = torch.device(CPU)
    backend = registry.backends().get(CPU)
    unsupported = None if backend is None else backend.unavailable()
    capabilities = frozenset() if backend is None or unsupported else backend.capabilities(device)
    return Target(
        chip=CPU,
        product="this machine's processor",
        device_type=CPU,
        backend=backend,
        capabilities=capabilities,
        unsupported=unsupported,
        peaks=None,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What would serve a call on a target: backend and kernel, None for the reference; and the refusals before it."""

    backend: str
    kernel: Kernel | None
    refusals: tuple[Refused, ...]


def served(op: Op[..., Any], call: Call, target: Target) -> Served:
    """Choose as dispatch does, without the device: by capabilities, dtype and the kernel's own refusals.

    Args:
        op: the op.
        call: of it, on `meta`.
        target: the device.
    """
    refusals: list[Refused] = []
    dtype = str(getattr(call, next(iter(op.kinds))).dtype).removeprefix("torch.")
    for backend, kernel in registry.kernels(op.name):
        if backend.name == TORCH:
            reason, capabilities = None, backend.capabilities(torch.device(target.device_type))
        elif target.backend is not None and backend.name == target.backend.name:
            reason, capabilities = target.unsupported, target.capabilities
        else:
            continue
        if reason is None and (missing := sorted(kernel.requires - capabilities)):
            reason = f"needs {', '.join(missing)}, which {target.chip} lacks"
        if reason is None and kernel.dtypes is not None and dtype not in kernel.dtypes:
            reason = f"dtype {dtype}; needs {' or '.join(sorted(kernel.dtypes))}"
        refusal = reason or candidate_of(op, backend.name, kernel).refusal(call)
        if refusal is None:
            return Served(backend.name, kernel, tuple(refusals))
        refusals.append(Refused(backend.name, kernel.forward, refusal, of_call=reason is None))
    return Served("reference", None, tuple(refusals))
