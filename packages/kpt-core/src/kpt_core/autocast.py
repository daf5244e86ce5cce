"""torch's autocast: what an op converts, and switching it off, on any device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .contract import Call, Op


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a block in which autocast does nothing on `device_type`, which need not know autocast (meta)."""
    if torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def converted(op: Op[..., Any], call: Call) -> Call:
    """Return the call with the tensors that the op names in autocast's dtype, as torch does for its own ops."""
    first = next((value for value in call if isinstance(value, Tensor)), None)
    if first is None:
        return call
    device_type = first.device.type
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return call
    dtype = torch.get_autocast_dtype(device_type)

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        # 8-bit numbers mean nothing without their scales.
        return value if value.dtype is torch.float64 or value.dtype.itemsize == 1 else value.to(dtype)

    values = [
        convert(value) if name in op.autocast else value for name, value in zip(op.parameters, call, strict=False)
    ]
    return op.Call(*values, (), None)
