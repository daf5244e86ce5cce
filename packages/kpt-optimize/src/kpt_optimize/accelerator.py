"""`kpt_optimize.devices` under its former name, for one release."""

import warnings
from typing import Any

from kpt_optimize import devices


def __getattr__(name: str) -> Any:
    new = "DeviceLike" if name == "Device" else name
    if new not in devices.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"kpt_optimize.accelerator.{name} is kpt_optimize.devices.{new}; the old path works for one release"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(devices, new)
