"""The software around the device: what is installed, and what is wrong with it."""

import importlib.metadata
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .chips import OLDEST, chip_name, unsupported

_INSTALL_TORCH = "install one that is: https://pytorch.org/get-started/locally"
_OLDEST_TRITON = (3, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver of this machine.

    Attributes:
        version: for instance `580.65.06`.
        cuda: the newest CUDA that it supports, major and minor.
        missing: why these are None.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, and what is wrong; what is not there is None.

    Attributes:
        torch: its version.
        cuda: the CUDA that torch is built for, `13.0`.
        hip: the ROCm that torch is built for.
        cudnn: version of cuDNN as torch gives it, 91100 is 9.11.0.
        nccl: version of NCCL, `2.28.9`.
        driver: the NVIDIA driver.
        triton: version of Triton.
        devices: names of the devices that torch sees.
        arch_list: what torch's own kernels are compiled for, `sm_90`.
        visible_devices: the environment variable `CUDA_VISIBLE_DEVICES`.
        problems: what keeps things from running, a sentence each; none means that all is well.
        advice: what could be better, a sentence each.
    """

    torch: str
    cuda: str | None
    hip: str | None
    cudnn: int | None
    nccl: str | None
    driver: Driver
    triton: str | None
    devices: tuple[str, ...]
    arch_list: tuple[str, ...]
    visible_devices: str | None
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def environment() -> Environment:
    """Look at the software of this process; it never raises, whatever is missing."""
    problems, advice = [], []
    reason = why_unavailable()
    if reason is not None:
        problems.append(reason)
    seen = _seen()
    arch_list = tuple(torch.cuda.get_arch_list())
    for index, (name, capability) in enumerate(seen):
        too_old = unsupported(capability)
        if too_old and reason is None:
            problems.append(f"cuda:{index} ({name}): {too_old}")
        elif not too_old and arch_list and not _torch_serves(capability, arch_list):
            problems.append(
                f"cuda:{index} ({name}) is {chip_name(capability)}, but torch {torch.__version__} has "
                f"kernels for {', '.join(arch_list)} alone; {_INSTALL_TORCH.replace('that is', 'that has them')}"
            )
    triton = _version("triton")
    if triton is not None and _numbers(triton) < _OLDEST_TRITON:
        problems.append(f"triton {triton} is too old for KPT's kernels; pip install 'triton>=3.6'")
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # two cuDNNs that don't fit, or one that dropped this device
        cudnn = None
        problems.append(f"cuDNN can't be used: {str(error).splitlines()[0]}")
    if seen and "expandable_segments:True" not in _allocator_settings():
        advice.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before the process starts, keeps memory from "
            "falling into pieces when shapes vary"
        )
    return Environment(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=cudnn,
        nccl=_nccl(),
        driver=driver(),
        triton=triton,
        devices=tuple(name for name, _ in seen),
        arch_list=arch_list,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        problems=tuple(problems),
        advice=tuple(advice),
    )


def why_unavailable() -> str | None:
    """What keeps every kernel of this backend from running here, and the remedy, in a sentence; None if nothing does.

    Nothing is remembered, so the answer is never that of before. NVML is asked before CUDA is initialised, so that a
    process may still fork afterwards where torch finds devices without CUDA (`PYTORCH_NVML_BASED_CUDA_CHECK=1`).
    """
    return why_no_device() or _why_no_usable_device() or _why_no_triton()


def why_no_device() -> str | None:
    """Why torch sees no NVIDIA device, and the remedy, in a sentence; None if it sees one, which may be too old."""
    version = torch.__version__
    if torch.version.hip is not None:
        return (
            f"torch {version} is built for ROCm {torch.version.hip}, not for CUDA; with an NVIDIA device, "
            f"{_INSTALL_TORCH.replace('that is', 'for CUDA')}"
        )
    if torch.version.cuda is None:
        return f"torch {version} is not built for CUDA; {_INSTALL_TORCH}"
    if torch.cuda.is_initialized() and torch.cuda.device_count() > 0:
        return None
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return _why_hidden(str(complaints[0].message).splitlines()[0] if complaints else None)


def _why_hidden(complaint: str | None) -> str:
    """Why a torch that is built for CUDA sees no device; `complaint` is what it warned of."""
    found = driver()
    if found.missing is not None:
        return (
            f"no NVIDIA driver answers ({found.missing}); install one (https://www.nvidia.com/drivers), and give a "
            "container the devices (docker run --gpus all)"
        )
    built = _numbers(torch.version.cuda or "")
    # A driver serves every minor version of the CUDA that it is of ("CUDA Compatibility", minor version compatibility).
    if found.cuda is not None and built and found.cuda[0] < built[0]:
        return (
            f"the NVIDIA driver {found.version} is for CUDA {found.cuda[0]}.{found.cuda[1]} and older, and torch "
            f"{torch.__version__} is built for CUDA {torch.version.cuda}; update the driver, or install a torch built "
            f"for CUDA {found.cuda[0]}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device to see; unset it, or name one of `nvidia-smi -L`"
    detail = f" ({complaint})" if complaint else ""
    return f"torch sees no CUDA device{detail}; look whether `nvidia-smi` lists one"


def _why_no_usable_device() -> str | None:
    if not torch.cuda.is_initialized():
        machine = compute_capabilities()
        # Hidden devices are among these: only where all are alike do they tell of those that torch sees.
        if machine and all(capability >= OLDEST for capability in machine):
            return None
    try:
        found = _described()
    except RuntimeError as error:  # of the driver, or of a process that was forked after CUDA was initialised
        return f"CUDA can't be initialised: {str(error).splitlines()[0]}"
    if any(capability >= OLDEST for _, capability in found):
        return None
    return "; ".join(dict.fromkeys(f"{name}: {unsupported(capability)}" for name, capability in found))


def _described() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of every device that torch sees; CUDA is initialised."""
    return [
        (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    ]


def _seen() -> list[tuple[str, tuple[int, int]]]:
    """As `_described`; nothing where CUDA is not there or can't be initialised."""
    try:
        return [] if why_no_device() is not None else _described()
    except RuntimeError:
        return []


def _why_no_triton() -> str | None:
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return None
    return "triton is not installed; pip install 'triton>=3.6'"


def _torch_serves(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether torch's own kernels run on a device: machine code of its generation, or PTX that is not newer."""
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = divmod(int(digits), 10)
        if kind == "compute" and built <= capability:
            return True
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def _allocator_settings() -> str:
    # Newer versions of torch have renamed it and still read the old name.
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, ImportError, RuntimeError):  # a build without it
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `3.9.0+git1` is (3, 9)."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def driver() -> Driver:
    """Return the driver's versions as NVML tells them, which initialises no CUDA; never raises."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return Driver(missing=nvml)
    version = _ask(nvml, "nvmlSystemGetDriverVersion")
    number = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return Driver(
        version=version.decode() if isinstance(version, bytes) else version,
        cuda=None if number is None else (number // 1000, number % 1000 // 10),
    )


def compute_capabilities() -> tuple[tuple[int, int], ...] | None:
    """Return the compute capabilities of every GPU of this machine, hidden ones too; None if NVML does not answer."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return None
    handles = [
        _ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0)
    ]
    told = [_ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle) for handle in handles if handle is not None]
    return tuple((int(pair[0]), int(pair[1])) for pair in told if pair is not None)


def _nvml() -> Any:
    """Return the module `pynvml`, initialised for the rest of the process, or why it does not answer."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed; pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML did not start: {error}"
    return pynvml


def _ask(nvml: Any, name: str, *args: Any) -> Any:
    """Return the answer, or None if NVML refuses it."""
    try:
        return getattr(nvml, name)(*args)
    except nvml.NVMLError:
        return None
