"""The software around the device: what is installed, and what is wrong with it."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .chips import chip_name, unsupported

_INSTALL_TORCH = "install one for ROCm: https://pytorch.org/get-started/locally"
#: The kernel driver's device, which every process that computes must be able to read and write.
_DRIVER = Path("/dev/kfd")
_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, and what is wrong; what is not there is None.

    Attributes:
        torch: its version.
        hip: the ROCm that torch is built for.
        triton: version of Triton.
        devices: names of the devices that torch sees.
        visible_devices: the environment variables that hide devices, as they are set.
        problems: what keeps things from running, a sentence each; none means that all is well.
        advice: what could be better, a sentence each.
    """

    torch: str
    hip: str | None
    triton: str | None
    devices: tuple[str, ...]
    visible_devices: dict[str, str]
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def environment() -> Environment:
    """Look at the software of this process; it never raises, whatever is missing."""
    reason = why_unavailable()
    problems, advice = [reason] if reason is not None else [], []
    seen = [] if why_no_device() is not None else _described()
    for index, (name, chip) in enumerate(seen):
        if reason is None and (why := unsupported(chip)) is not None:
            problems.append(f"cuda:{index} ({name}): {why}")
        if chip == "gfx942" and os.environ.get("TORCH_BLAS_PREFER_HIPBLASLT") == "0":
            advice.append("TORCH_BLAS_PREFER_HIPBLASLT=0 leaves out hipBLASLt, the faster library for products here")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return Environment(
        torch=str(torch.__version__),
        hip=torch.version.hip,
        triton=triton,
        devices=tuple(name for name, _ in seen),
        visible_devices={name: os.environ[name] for name in _HIDING if name in os.environ},
        problems=tuple(problems),
        advice=tuple(dict.fromkeys(advice)),
    )


def why_unavailable() -> str | None:
    """Return what keeps every kernel of this backend from running here, and the remedy; None if nothing does."""
    return why_no_device() or _why_no_usable_device() or _why_no_triton()


def why_no_device() -> str | None:
    """Return why torch sees no AMD device, and the remedy; None if it sees one, which may be unsupported."""
    version = torch.__version__
    if torch.version.hip is None:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "not built for a GPU"
        return f"torch {version} is {built}, not for ROCm; with an AMD device, {_INSTALL_TORCH}"
    if torch.cuda.is_available():
        return None
    if not _DRIVER.exists():
        return (
            f"no AMD driver answers ({_DRIVER} is not there); install the amdgpu driver, and give a container the "
            "devices (docker run --device /dev/kfd --device /dev/dri)"
        )
    if not os.access(_DRIVER, os.R_OK | os.W_OK):
        return f"this user may not open {_DRIVER}; join the groups that own it (usermod -aG render,video $USER)"
    hiding = [f"{name}={os.environ[name]!r}" for name in _HIDING if name in os.environ]
    if hiding:
        return f"{' and '.join(hiding)} may leave no device to see; unset it, or name one that `rocminfo` lists"
    return "torch sees no ROCm device; look whether `rocminfo` lists one"


def _why_no_usable_device() -> str | None:
    try:
        found = _described()
    except RuntimeError as error:  # of the driver, or of a process that was forked after HIP was initialised
        return f"HIP can't be initialised: {str(error).splitlines()[0]}"
    if any(unsupported(chip) is None for _, chip in found):
        return None
    return "; ".join(dict.fromkeys(f"{name}: {unsupported(chip)}" for name, chip in found))


def _described() -> list[tuple[str, str]]:
    """Return name and chip of every device that torch sees."""
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(properties.name, chip_name(properties.gcnArchName)) for properties in every]


def _why_no_triton() -> str | None:
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return None
    return "triton is not installed; torch for ROCm brings one, or pip install 'triton>=3.6'"
