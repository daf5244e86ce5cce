"""Switching torch's autocast off, on any device."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A block in which autocast does nothing on `device_type`; also for devices that don't know autocast (meta)."""
    if torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
