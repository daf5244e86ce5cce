"""The software around the device: what is installed, and what is wrong with it."""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .chips import unsupported

_INSTALL_TORCH = "install the torch for it: https://pytorch.org/get-started/locally"
#: Where the kernel driver's devices are; a process that computes must be able to read and write one.
_DRIVERS = Path("/dev/dri")
#: Intel's extension for PyTorch, and what became of it.
IPEX = "intel_extension_for_pytorch"
IPEX_ARCHIVED = "it is archived upstream since March 2026 and gets no security fixes"
_HIDING = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, and what is wrong; what is not there is None.

    Attributes:
        torch: its version.
        driver: version of the first device's driver.
        triton: version of Triton.
        ipex: version of Intel's extension for PyTorch, which `torch.xpu` has replaced.
        devices: names of the devices that torch sees.
        visible_devices: the environment variables that hide devices, as they are set.
        problems: what keeps things from running, a sentence each; none means that all is well.
        advice: what could be better, a sentence each.
    """

    torch: str
    driver: str | None
    triton: str | None
    ipex: str | None
    devices: tuple[str, ...]
    visible_devices: dict[str, str]
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def environment() -> Environment:
    """Look at the software of this process; it never raises, whatever is missing."""
    reason = why_unavailable()
    problems, advice = [reason] if reason is not None else [], []
    seen = [] if why_no_device() is not None else _described()
    for index, properties in enumerate(seen):
        if reason is None and (why := unsupported(properties)) is not None:
            problems.append(f"xpu:{index} ({properties.name}): {why}")
    ipex = version(IPEX)
    if ipex is not None:
        advice.append(f"{IPEX} {ipex} is installed; {IPEX_ARCHIVED}, and KPT needs torch's own xpu devices alone")
    return Environment(
        torch=str(torch.__version__),
        driver=seen[0].driver_version if seen else None,
        triton=version("pytorch-triton-xpu") or version("triton-xpu") or version("triton"),
        ipex=ipex,
        devices=tuple(properties.name for properties in seen),
        visible_devices={name: os.environ[name] for name in _HIDING if name in os.environ},
        problems=tuple(problems),
        advice=tuple(advice),
    )


def why_unavailable() -> str | None:
    """Return what keeps every kernel of this backend from running here, and the remedy; None if nothing does."""
    return why_no_device() or _why_no_usable_device() or _why_no_triton()


def why_no_device() -> str | None:
    """Return why torch sees no Intel GPU, and the remedy; None if it sees one, which may be unsupported."""
    if not torch.xpu._is_compiled():
        return f"torch {torch.__version__} is not built for Intel GPUs; with one, {_INSTALL_TORCH}"
    if torch.xpu.is_available():
        return None
    drivers = sorted(_DRIVERS.glob("renderD*"))
    if not drivers:
        return (
            f"no driver answers ({_DRIVERS} has no device to compute on); install Intel's GPU driver, and give a "
            f"container the devices (docker run --device {_DRIVERS})"
        )
    if not any(os.access(driver, os.R_OK | os.W_OK) for driver in drivers):
        return f"this user may open no device in {_DRIVERS}; join the group that owns them (usermod -aG render $USER)"
    hiding = [f"{name}={os.environ[name]!r}" for name in _HIDING if name in os.environ]
    if hiding:
        return f"{' and '.join(hiding)} may leave no device to see; unset it, or name one that `sycl-ls` lists"
    return "torch sees no Intel GPU; look whether `sycl-ls` lists one under level_zero"


def _why_no_usable_device() -> str | None:
    try:
        found = _described()
    except RuntimeError as error:  # of the driver, or of a process that was forked after SYCL was initialised
        return f"SYCL can't be initialised: {str(error).splitlines()[0]}"
    if any(unsupported(properties) is None for properties in found):
        return None
    return "; ".join(dict.fromkeys(f"{properties.name}: {unsupported(properties)}" for properties in found))


def _described() -> list[Any]:
    """Return torch's properties of every device that it sees."""
    return [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]


def _why_no_triton() -> str | None:
    found = importlib.util.find_spec("triton")
    if found is None:
        return "triton is not installed; torch for Intel GPUs brings the one that fits it"
    folders = found.submodule_search_locations or ()
    if any(Path(folder, "backends", "intel").is_dir() for folder in folders):
        return None
    return "the triton that is installed has no part for Intel GPUs; take the one that torch for them brings"


def version(distribution: str) -> str | None:
    """Return what version of a distribution is installed, None if none is; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
