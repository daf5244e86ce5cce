"""Where the weights of experts live while they are not on the compute device, and how one expert gets there."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe._tensor_files import appearing, open_tensors

from .cache import ExpertWeights

#: Bytes from which on a copy on the host gets pages of its own.
_PAGES_FROM = 2**16


class HostStore:
    """Stacked parameters `[num_experts, ...]` of experts modules in host memory, by their paths.

    Those on the host already are not copied, unless `pin` asks for page-locked memory, from which accelerators copy
    without the host's help.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, pin: bool = False) -> None:
        host = {name: tensor.detach().to("cpu") for name, tensor in parameters.items()}
        self._parameters = {name: tensor.pin_memory() for name, tensor in host.items()} if pin else host

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """One expert's slice `[1, ...]` of a parameter, or that of all: views, not to be changed."""
        stacked = self._parameters[name]
        return stacked if expert is None else stacked[expert : expert + 1]


class DiskStore:
    """The same in a safetensors file, of which a read maps the slices of one expert into memory.

    The file is opened for each read and closed after it: what was read of a mapping that stays open would count as
    resident memory for as long. The file must hold parameters of these names, shapes and dtypes; their values do not
    matter.
    """

    def __init__(self, path: str | os.PathLike[str], parameters: Mapping[str, Tensor]) -> None:
        self.path = Path(path)
        with open_tensors(path) as file:
            present = set(file.keys())
            for name, want in parameters.items():
                if name not in present:
                    raise InputError(f"{self.path} holds no {name!r}: it was written for another model")
                part = file.get_slice(name)
                dtype, shape = part[:0].dtype, part.get_shape()
                if (dtype, shape) != (want.dtype, list(want.shape)):
                    raise InputError(
                        f"{self.path}: {name!r} must be {want.dtype} {list(want.shape)}; the file has {dtype} {shape}: "
                        "it was written for another model"
                    )

    @staticmethod
    def write(path: str | os.PathLike[str], parameters: Mapping[str, Tensor]) -> None:
        """Write a new file into a folder that is there; it appears whole or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        if path.exists():
            raise InputError(f"{path} exists already: name a new file, or build the experts on 'meta' to read this one")
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is no folder: make it, or name a file in another one")
        with appearing(path) as temporary:
            save_file({name: t.detach().to("cpu").contiguous() for name, t in parameters.items()}, temporary)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """As of `HostStore`; a view of the mapping for one expert, a copy of all."""
        with open_tensors(self.path) as file:
            part = file.get_slice(name)
            stacked: Tensor = part[:].clone() if expert is None else part[expert : expert + 1]
            return stacked


class Transfer:
    """Copies to one device, on an accelerator in a stream of their own so that they overlap with computation.

    The way to an accelerator was written without one: it has not run yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def __call__(self, parameters: Mapping[str, Tensor]) -> ExpertWeights:
        """Copies of tensors on the host."""
        if self._module is None:
            here = {name: _copy_on_host(tensor) for name, tensor in parameters.items()}
            return lambda: here
        with self._module.stream(self._stream):
            copies = {name: t.to(self.device, non_blocking=True) for name, t in parameters.items()}
            copied = self._module.Event()
            copied.record()

        def arrived() -> Mapping[str, Tensor]:
            # The current stream waits for the copies, and the memory stays until that stream has read it.
            stream = self._module.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in copies.values():
                tensor.record_stream(stream)
            return copies

        return arrived


def _copy_on_host(tensor: Tensor) -> Tensor:
    """A copy whose memory goes back to the system with it: an allocator that copies come and go from keeps holes."""
    if tensor.nbytes < _PAGES_FROM:
        return tensor.clone()
    return torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
