"""Set switches of torch and give them back: TF32, cuDNN's trials, deterministic algorithms, memory."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from .config import DeviceConfig


class AppliedSettings(ExitStack):
    """What `apply_settings` changed; the end of a `with` block, or `restore`, gives back what was before.

    Attributes:
        changes: what was set, a sentence each.
    """

    changes: tuple[str, ...] = ()

    def restore(self) -> None:
        """Give back what was before; a second call does nothing."""
        self.close()


def apply_settings(config: DeviceConfig) -> AppliedSettings:
    """Set torch's switches as a configuration says.

    They are the process's, of every thread. What the configuration leaves None stays as it is. Several that are applied
    one inside the other are given back in the opposite order.

    Args:
        config: which of `allow_tf32`, `cudnn_benchmark`, `deterministic` and `memory_fraction` to set; the last one
            only where there is a device.

    Returns:
        What changed, and the way back.
    """
    changes = []
    with AppliedSettings() as stack:
        if config.allow_tf32 is not None:
            stack.enter_context(_tf32(config.allow_tf32))
            changes.append(f"float32 products and convolutions {'may' if config.allow_tf32 else 'may not'} use TF32")
        if config.cudnn_benchmark is not None:
            stack.enter_context(_attribute(torch.backends.cudnn, "benchmark", config.cudnn_benchmark))
            changes.append(f"cuDNN {'times' if config.cudnn_benchmark else 'does not time'} its algorithms")
        if config.deterministic is not None:
            stack.enter_context(_deterministic(config.deterministic))
            changes.append(f"deterministic algorithms are {'' if config.deterministic else 'not '}required")
        if config.memory_fraction is not None and torch.get_device_module(config.device_type).is_available():
            stack.enter_context(_memory_fraction(config.memory_fraction, config))
            changes.append(f"this process may take {config.memory_fraction:.0%} of the device's memory")
        applied = stack.pop_all()
        applied.changes = tuple(changes)
        return applied


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Set both of torch's interfaces alike.

    Since torch 2.9 there are two, and once they disagree reading the older one raises; `set_float32_matmul_precision`
    and `cudnn.allow_tf32` write both. The former is for oneDNN's products on the CPU too.
    """
    with warnings.catch_warnings():  # torch 2.9 warns of the older one, which is the only one of versions before
        warnings.simplefilter("ignore")
        back = [*_older_switches(), *_newer_switches()]
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for restore, value in back:
                restore(value)


def _older_switches() -> Iterator[tuple[Callable[[Any], None], Any]]:
    with suppress(RuntimeError):  # the user wrote the newer one, which then is all there is to give back
        yield torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        yield partial(setattr, torch.backends.cudnn, "allow_tf32"), torch.backends.cudnn.allow_tf32


def _newer_switches() -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Those of torch 2.9 and newer."""
    backends = torch.backends
    for path in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn"):
        family, _, name = path.partition(".")
        owner = getattr(getattr(backends, family), name, None)
        if owner is not None and hasattr(owner, "fp32_precision"):
            yield partial(setattr, owner, "fp32_precision"), owner.fp32_precision


@contextmanager
def _deterministic(required: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    with _attribute(torch.backends.cudnn, "deterministic", required):
        torch.use_deterministic_algorithms(required)
        if required and workspace is None:
            # Without it cuBLAS, and so torch, refuses deterministic products ("Results Reproducibility").
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            if required and workspace is None:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def _memory_fraction(fraction: float, config: DeviceConfig) -> Iterator[None]:
    of, device = torch.get_device_module(config.device_type), config.device
    # torch takes neither a device without an index nor a whole number here.
    index = device.index if isinstance(device, torch.device) and device.index is not None else of.current_device()
    read = getattr(of, "get_per_process_memory_fraction", None)  # older versions of torch lack it
    before = 1.0 if read is None else read(index)
    of.set_per_process_memory_fraction(float(fraction), index)
    try:
        yield
    finally:
        of.set_per_process_memory_fraction(before, index)
