"""What a user may set of a backend for an accelerator, and torch's switches: set as configured, and given back."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

import torch

from kpt_core.errors import InputError, UnknownNameError

DeviceLike = int | str | torch.device | None
"""A device of a backend: an index, `"cuda"`, `"cuda:1"`, a `torch.device`; None for the current one."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Settings of `AcceleratorBackend.prepare_model` and `apply_settings`; None leaves a thing as it is.

    A vendor's configuration derives from it and names its `device_type`. Which kernels may run is no setting of a
    backend: `kpt_core.use`, `kpt_optimize.config.Config` and `KPT_DISABLE` decide it.

    Attributes:
        device: where a model goes: an index, `"cuda"`, `"cuda:1"`, a `torch.device`; None for the current device.
        dtype: of a prepared model's floating-point parameters and buffers, a `torch.dtype` or its name.
        channels_last: whether four-dimensional parameters (those of convolutions) are stored channels last.
        pad: whether `nn.Linear` layers of awkward sizes are padded, see `kpt_optimize.padding.pad_model`.
        allow_tf32: whether float32 products and convolutions may round their operands to TF32 (10 bits of mantissa).
        cudnn_benchmark: whether cuDNN (MIOpen on ROCm) times its algorithms for each new shape.
        deterministic: whether torch takes deterministic algorithms alone and raises where there is none.
        memory_fraction: share of the device's memory that this process's allocator may take, above 0 and up to 1.

    Raises:
        InputError: a value is not allowed, or two contradict each other.
    """

    device_type: ClassVar[str] = "cuda"

    device: DeviceLike = None
    dtype: torch.dtype | str | None = None
    channels_last: bool = False
    pad: bool = False
    allow_tf32: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_of_type(self.device, self.device_type))
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        for name in ("channels_last", "pad", "allow_tf32", "cudnn_benchmark", "deterministic"):
            value, required = getattr(self, name), name in ("channels_last", "pad")
            if not isinstance(value, bool) and (required or value is not None):
                raise InputError(f"{name} must be True{' or False' if required else ', False or None'}; got {value!r}")
        fraction = self.memory_fraction
        if fraction is not None and (type(fraction) not in (int, float) or not 0 < fraction <= 1):
            raise InputError(f"memory_fraction must be above 0 and at most 1, or None; got {fraction!r}")
        if self.deterministic and self.cudnn_benchmark:
            raise InputError(
                "deterministic and cudnn_benchmark contradict each other: what is fastest may be another algorithm in "
                "the next run; set one of them"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Make one of what a configuration file holds: names and values of fields.

        Raises:
            UnknownNameError: a name is no setting; the message offers the nearest.
            InputError: a value is not allowed.
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownNameError("setting", name, known)
        return cls(**settings)


def device_of_type(device: DeviceLike, device_type: str) -> torch.device | None:
    """Return a device as torch names it; None stays None.

    Raises:
        InputError: it is of another type, or no device at all.
    """
    if device is None:
        return None
    if type(device) is int and device >= 0:
        return torch.device(device_type, device)
    if isinstance(device, str | torch.device):
        with suppress(RuntimeError):
            found = torch.device(device)
            if found.type == device_type:
                return found
    given = device if isinstance(device, torch.device) else repr(device)
    raise InputError(
        f"device must be of type {device_type}; got {given}, expected an index, '{device_type}', '{device_type}:0' or "
        "a torch.device of that type"
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise InputError(
            f"dtype must be one of {', '.join(DTYPES)}, or None; got {dtype!r} (weights in fewer bits need scales: "
            "quantise the model instead)"
        )
    return found


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
    """Set torch's switches as a configuration says, and return what changed, which is the way back.

    They are the process's, of every thread. What the configuration leaves None stays as it is. Several that are applied
    one inside the other are given back in the opposite order.

    Args:
        config: which of `allow_tf32`, `cudnn_benchmark`, `deterministic` and `memory_fraction` to set; the last one
            only where there is a device.
    """
    changes = []
    with AppliedSettings() as stack:
        if config.allow_tf32 is not None:
            _set_tf32(stack, config.allow_tf32)
            changes.append(f"float32 products and convolutions {'may' if config.allow_tf32 else 'may not'} use TF32")
        if config.cudnn_benchmark is not None:
            _set(stack, torch.backends.cudnn, "benchmark", config.cudnn_benchmark)
            changes.append(f"cuDNN {'times' if config.cudnn_benchmark else 'does not time'} its algorithms")
        if config.deterministic is not None:
            _set_deterministic(stack, config.deterministic)
            changes.append(f"deterministic algorithms are {'' if config.deterministic else 'not '}required")
        # Asked for here alone: not every device has a module of torch's.
        of = None if config.memory_fraction is None else torch.get_device_module(config.device_type)
        if config.memory_fraction is not None and of is not None and of.is_available():
            _set_memory_fraction(stack, of, config.memory_fraction, config.device)
            changes.append(f"this process may take {config.memory_fraction:.0%} of the device's memory")
        applied = stack.pop_all()
        applied.changes = tuple(changes)
        return applied


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _set_tf32(stack: ExitStack, allowed: bool) -> None:
    """Set both of torch's interfaces alike.

    Since torch 2.9 there are two, and once they disagree reading the older one raises; `set_float32_matmul_precision`
    and `cudnn.allow_tf32` write both. The former is for oneDNN's products on the CPU too.
    """
    back = list(_tf32_switches())
    stack.callback(_call_quietly, back)
    precision = (torch.set_float32_matmul_precision, "high" if allowed else "highest")
    _call_quietly([precision, (partial(setattr, torch.backends.cudnn, "allow_tf32"), allowed)])


def _call_quietly(calls: list[tuple[Callable[[Any], None], Any]]) -> None:
    with warnings.catch_warnings():  # torch 2.9 warns of the older interface, which is the only one of versions before
        warnings.simplefilter("ignore")
        for call, value in calls:
            call(value)


def _tf32_switches() -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yield what sets each switch, and its value now: the older interface's first."""
    backends = torch.backends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(RuntimeError):  # the user wrote the newer one, which then is all there is to give back
            yield torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
        with suppress(RuntimeError):
            yield partial(setattr, backends.cudnn, "allow_tf32"), backends.cudnn.allow_tf32
    for family, name in (("cuda", "matmul"), ("mkldnn", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn")):
        owner = getattr(getattr(backends, family), name, None)
        if owner is not None and hasattr(owner, "fp32_precision"):
            yield partial(setattr, owner, "fp32_precision"), owner.fp32_precision


def _set_deterministic(stack: ExitStack, required: bool) -> None:
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warned)
    _set(stack, torch.backends.cudnn, "deterministic", required)
    torch.use_deterministic_algorithms(required)
    if required and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        # Without it cuBLAS, and so torch, refuses deterministic products ("Results Reproducibility").
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        stack.callback(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)


def _set_memory_fraction(stack: ExitStack, of: Any, fraction: float, device: DeviceLike) -> None:
    # torch takes neither a device without an index nor a whole number here.
    index = device.index if isinstance(device, torch.device) and device.index is not None else of.current_device()
    read = getattr(of, "get_per_process_memory_fraction", None)  # older versions of torch lack it
    stack.callback(of.set_per_process_memory_fraction, 1.0 if read is None else read(index), index)
    of.set_per_process_memory_fraction(float(fraction), index)
