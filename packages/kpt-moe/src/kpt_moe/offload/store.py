"""Where the weights of experts live while they are not on the compute device."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, KptError


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """What one module of experts keeps in a store.

    Attributes:
        name: path of the module in its model.
        num_experts: number of experts.
        parameters: shape `[num_experts, ...]` and dtype of every parameter, by name.
    """

    name: str
    num_experts: int
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: of its slice of every parameter."""
        per_parameter = (torch.Size(shape[1:]).numel() * dtype.itemsize for shape, dtype in self.parameters.values())
        return sum(per_parameter)

    @classmethod
    def of(cls, name: str, num_experts: int, parameters: Mapping[str, Tensor]) -> "StackedExperts":
        """The description of these parameters."""
        return cls(name, num_experts, {key: (tuple(t.shape), t.dtype) for key, t in parameters.items()})


class ExpertStore(ABC):
    """Stacked parameters `[num_experts, ...]` of experts modules, read one expert at a time."""

    @abstractmethod
    def expert(self, name: str, parameter: str, expert: int) -> Tensor:
        """`[1, ...]` on the host: the slice of one expert; it may share the store's memory, so it must not be changed.

        Args:
            name: path of the experts module.
            parameter: name of the parameter in it.
            expert: number of the expert.
        """

    @abstractmethod
    def stacked(self, name: str, parameter: str) -> Tensor:
        """`[num_experts, ...]` on the host: the parameter of all experts."""


class HostStore(ExpertStore):
    """Experts in host memory.

    Args:
        parameters: of each experts module, by its path; those on the host already are not copied, unless pinned.
        pin: keep them in page-locked memory, from which accelerators copy without the host's help.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Tensor]], *, pin: bool = False) -> None:
        def hold(tensor: Tensor) -> Tensor:
            host = tensor.detach().to("cpu")
            return host.pin_memory() if pin else host

        self._parameters = {name: {key: hold(t) for key, t in own.items()} for name, own in parameters.items()}

    def expert(self, name: str, parameter: str, expert: int) -> Tensor:
        """As in `ExpertStore`; a view."""
        return self._parameters[name][parameter][expert : expert + 1]

    def stacked(self, name: str, parameter: str) -> Tensor:
        """As in `ExpertStore`; the store's own tensor."""
        return self._parameters[name][parameter]


class DiskStore(ExpertStore):
    """Experts in a safetensors file, of which a read maps the slices of one expert into memory.

    The file is opened for each read and closed after it: what was read of a mapping that stays open would count as
    resident memory for as long. Tensors are named as in the model's state dict.

    Args:
        path: the file.
        layers: what it must hold.

    Raises:
        InputError: no such file, or it is damaged, or it does not hold that.
    """

    def __init__(self, path: str | os.PathLike[str], layers: Mapping[str, StackedExperts]) -> None:
        self.path = Path(path)
        _safetensors()
        expected = {f"{name}.{key}": what for name, layer in layers.items() for key, what in layer.parameters.items()}
        with self._open() as file:
            present = set(file.keys())
            for key, (shape, dtype) in expected.items():
                if key not in present:
                    raise InputError(f"{self.path} holds no {key!r}: it was written for another model")
                part = file.get_slice(key)
                found = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
                if found != (shape, dtype):
                    raise InputError(
                        f"{self.path}: {key!r} must be {dtype} {list(shape)}; the file has {part.get_dtype()} "
                        f"{list(found[0])}: it was written for another model"
                    )

    @classmethod
    def write(cls, path: str | os.PathLike[str], parameters: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write a file that appears whole or not at all.

        Args:
            path: must not exist yet; its folder must.
            parameters: of each experts module, by its path.

        Raises:
            InputError: the file exists, or its folder does not.
        """
        path = Path(path)
        save_file = _safetensors().torch.save_file
        if path.exists():
            raise InputError(f"{path} exists already: name a new file, or build the experts on 'meta' to read this one")
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is no folder: make it, or name a file in another one")
        flat = {f"{name}.{key}": t.detach().to("cpu") for name, own in parameters.items() for key, t in own.items()}
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            save_file({key: t.contiguous() for key, t in flat.items()}, temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def expert(self, name: str, parameter: str, expert: int) -> Tensor:
        """As in `ExpertStore`; a view of the mapping, which goes with it."""
        return self._read(name, parameter, lambda part: part[expert : expert + 1])

    def stacked(self, name: str, parameter: str) -> Tensor:
        """As in `ExpertStore`; a copy."""
        return self._read(name, parameter, lambda part: part[:].clone())

    def _read(self, name: str, parameter: str, read: Callable[[Any], Tensor]) -> Tensor:
        with self._open() as file:
            try:
                return read(file.get_slice(f"{name}.{parameter}"))
            except _safetensors().SafetensorError as error:
                raise KptError(f"{self.path}: {name}.{parameter} cannot be read: {error}") from error

    def _open(self) -> Any:
        try:
            return _safetensors().safe_open(self.path, framework="pt")
        except FileNotFoundError as error:
            raise InputError(f"{self.path} does not exist: the experts' weights were to be read from it") from error
        except (_safetensors().SafetensorError, OSError) as error:
            raise InputError(f"{self.path} is no readable safetensors file ({error}): write it anew") from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise InputError("a store on disk needs safetensors: pip install safetensors, or use store='host'") from error
    return safetensors
