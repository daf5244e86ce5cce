"""What a user may set of a backend for an accelerator, checked when it is set."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from kpt_core.errors import InputError, UnknownNameError

Device = int | str | torch.device | None
"""A device of a backend: an index, `"cuda"`, `"cuda:1"`, a `torch.device`; None for the current one."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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

    device: Device = None
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
        for name in ("channels_last", "pad"):
            _check_switch(name, getattr(self, name), "True or False", (bool,))
        for name in ("allow_tf32", "cudnn_benchmark", "deterministic"):
            _check_switch(name, getattr(self, name), "True, False or None", (bool, type(None)))
        fraction = self.memory_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if fraction is not None and not (is_number and 0 < fraction <= 1):
            raise InputError(f"memory_fraction must be above 0 and at most 1, or None; got {fraction!r}")
        if self.deterministic and self.cudnn_benchmark:
            raise InputError(
                "deterministic and cudnn_benchmark contradict each other: what is fastest may be another algorithm in "
                "the next run; set one of them"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Make one of what a configuration file holds.

        Args:
            settings: names and values of fields.

        Raises:
            UnknownNameError: a name is no setting; the message offers the nearest.
            InputError: a value is not allowed.
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownNameError("setting", name, known)
        return cls(**settings)


def device_of_type(device: Device, device_type: str) -> torch.device | None:
    """Return a device as torch names it; None stays None.

    Raises:
        InputError: it is of another type, or no device at all.
    """
    if device is None:
        return None
    wrong = InputError(
        f"device must be of type {device_type}; got {str(device) if isinstance(device, torch.device) else device!r}, "
        f"expected an index, '{device_type}', '{device_type}:0' or a torch.device of that type"
    )
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise wrong
    if isinstance(device, int):
        if device < 0:
            raise wrong
        return torch.device(device_type, device)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise wrong from None
    if found.type != device_type:
        raise wrong
    return found


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if named not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise InputError(
            f"dtype must be one of {names}, or None; got {dtype!r} (weights in fewer bits need scales: quantise the "
            "model instead)"
        )
    return named


def _check_switch(name: str, value: object, expected: str, types: tuple[type, ...]) -> None:
    if not isinstance(value, types):
        raise InputError(f"{name} must be {expected}; got {value!r}")
