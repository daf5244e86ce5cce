"""Copying one expert from the host to the compute device."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Bytes from which on a copy on the host gets pages of its own.
_PAGES_FROM = 2**16


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert on the compute device.

    Attributes:
        parameters: `[1, ...]` each, by name.
        copied: the event after the copies, None if they were complete when this was made.
    """

    parameters: Mapping[str, Tensor]
    copied: Any = None

    def wait(self) -> None:
        """Make the current stream wait for the copies, and the memory stay until that stream has read it."""
        if self.copied is None:
            return
        for tensor in self.parameters.values():
            stream = torch.get_device_module(tensor.device).current_stream(tensor.device)
            stream.wait_event(self.copied)
            tensor.record_stream(stream)


class Transfer:
    """Copies to one device, on an accelerator in a stream of their own so that they overlap with computation.

    The way to an accelerator was written without one: it has not run yet.

    Args:
        device: the compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def __call__(self, parameters: Mapping[str, Tensor]) -> ExpertWeights:
        """Copies of tensors on the host."""
        if self._module is None:
            return ExpertWeights({name: _copy_on_host(tensor.detach()) for name, tensor in parameters.items()})
        with self._module.stream(self._stream):
            copies = {name: t.detach().to(self.device, non_blocking=True) for name, t in parameters.items()}
            copied = self._module.Event()
            copied.record()
        return ExpertWeights(copies, copied)


def _copy_on_host(tensor: Tensor) -> Tensor:
    """A copy whose memory goes back to the system with it: an allocator that copies come and go from keeps holes."""
    if tensor.nbytes < _PAGES_FROM:
        return tensor.clone()
    return torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
