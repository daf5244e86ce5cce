"""The software around a TPU: what is installed, and what is wrong with it."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass

import torch

from .chips import attached, unsupported

#: Set to 1, kernels run on `xla` without a TPU (PJRT_DEVICE=CPU), for tests: Pallas interprets them, slowly.
INTERPRET = "KPT_TPU_INTERPRET"
#: Distributions, in the order in which they are missed.
_NEEDED = ("torch-xla", "jax", "torchax", "flax")
_INSTALL = "pip install './packages/kpt-backend-tpu[xla]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions, and what is wrong; what is not there is None.

    Attributes:
        torch: its version.
        torch_xla: version of torch-xla, whose devices are called `xla`.
        torch_tpu: version of torch-tpu, its successor, whose devices are called `tpu`.
        jax: version of JAX.
        libtpu: version of libtpu, the compiler and driver.
        chips: TPUs on this machine's PCI bus.
        platform: what torch_xla is told to use (PJRT_DEVICE).
        problems: what keeps things from running, a sentence each; none means that all is well.
    """

    torch: str
    torch_xla: str | None
    torch_tpu: str | None
    jax: str | None
    libtpu: str | None
    chips: tuple[str, ...]
    platform: str | None
    problems: tuple[str, ...]


def environment() -> Environment:
    """Look at the software of this process; it never raises, whatever is missing, and claims no TPU."""
    reason = why_unavailable()
    return Environment(
        torch=str(torch.__version__),
        torch_xla=_version("torch-xla"),
        torch_tpu=_version("torch-tpu"),
        jax=_version("jax"),
        libtpu=_version("libtpu"),
        chips=attached(),
        platform=os.environ.get("PJRT_DEVICE"),
        problems=() if reason is None else (reason,),
    )


def interpreting() -> bool:
    """Return whether kernels are to be interpreted where there is no TPU."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "on", "yes")


def why_unavailable() -> str | None:
    """Return what keeps every kernel of this backend from running here, and the remedy; None if nothing does."""
    return why_no_device() or _why_not_served()


def why_no_device() -> str | None:
    """Return why torch has no TPU, and the remedy; None if it has one, which may be unsupported.

    What is installed and plugged in is looked at; torch_xla is not imported, which takes seconds and claims the TPU.
    """
    chips = attached()
    if not chips and not interpreting():
        return "no TPU is on this machine's PCI bus; on Google Cloud take a TPU VM, and start containers --privileged"
    if torch_tpu():
        return None
    missing = [name for name in _NEEDED if _version(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {_INSTALL}"
    found, here = str(_version("torch-xla")), str(torch.__version__)
    if found.split(".")[:2] != here.split(".")[:2]:  # it ends in an undefined symbol where it is imported
        return f"torch-xla {found} runs beside torch {'.'.join(found.split('.')[:2])} alone; this is torch {here}"
    platform = os.environ.get("PJRT_DEVICE", "TPU" if chips else "CPU").upper()
    if platform != "TPU" and not interpreting():
        return f"PJRT_DEVICE={platform!r} has torch_xla use another device; set it to TPU"
    if platform == "TPU" and _version("libtpu") is None:
        return f"libtpu is not installed: {_INSTALL} libtpu"
    return None


def torch_tpu() -> bool:
    """Return whether torch_tpu made its devices known to this torch, which it does where it finds a TPU."""
    return "torch_tpu" in sys.modules and hasattr(torch, "tpu")


def chip() -> str:
    """Return the chip of this machine's TPUs; `cpu` where there is none and kernels are interpreted."""
    return next(iter(attached()), "cpu")


def _why_not_served() -> str | None:
    found = attached()
    return unsupported(found[0]) if found else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
