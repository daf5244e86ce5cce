"""What a request of the Open Inference Protocol v2 holds and may hold, whichever way it came; and its errors."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kpt_serve.package import Manifest
from kpt_serve.package import Tensor as Metadata
from kpt_serve.package.exporting import DATATYPES

DTYPES = {word: dtype for dtype, word in DATATYPES.items()}
#: Bytes that the loop reads and writes itself; more keeps other clients waiting, so a thread does it.
SMALL = 32 << 10
VERSION = "1"  #: of every model: a package is one version, and another version is another package


class Status(enum.Enum):
    """Say what became of a request, as the code of HTTP and of gRPC."""

    OK = 200, "OK"
    INVALID = 400, "INVALID_ARGUMENT"
    UNAUTHENTICATED = 401, "UNAUTHENTICATED"
    NOT_FOUND = 404, "NOT_FOUND"
    TIMEOUT = 408, "DEADLINE_EXCEEDED"
    TOO_LARGE = 413, "RESOURCE_EXHAUSTED"
    UNSUPPORTED = 415, "INVALID_ARGUMENT"
    CANCELLED = 499, "CANCELLED"
    FAILED = 500, "INTERNAL"
    BUSY = 503, "RESOURCE_EXHAUSTED"
    UNAVAILABLE = 503, "UNAVAILABLE"

    def __init__(self, http: int, grpc: str) -> None:
        self.http, self.grpc = http, grpc


class RequestError(Exception):
    """A request that gets no result: `status` and a sentence."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Request:
    """Inputs by name, the names of the outputs that are wanted, and the client's own id."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    id: str = ""


def invalid(text: str) -> RequestError:
    """Return the error of a request that is wrong in itself."""
    return RequestError(Status.INVALID, text)


def check_model(manifest: Manifest, name: str, version: str) -> None:
    """Raise unless a request is for the model that is served."""
    if name != manifest.name or version not in ("", VERSION):
        asked = name + (f", version {version}" if version else "")
        raise RequestError(Status.NOT_FOUND, f"there is no model {asked}; this server has {manifest.name}, version 1")


def metadata_of(manifest: Manifest, name: str) -> Metadata:
    """Return what a manifest says of an input."""
    for each in manifest.inputs:
        if each.name == name:
            return each
    raise invalid(f"there is no input {name!r}; expected {', '.join(each.name for each in manifest.inputs)}")


def check_tensor(metadata: Metadata, datatype: object, shape: object) -> tuple[int, ...]:
    """Return the shape of an input, if datatype and shape are what a manifest says."""
    name = metadata.name
    if datatype != metadata.datatype:
        raise invalid(f"input {name!r} is of datatype {datatype!r}; expected {metadata.datatype}")
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(type(size) is int for size in shape):
        raise invalid(f"input {name!r} has shape {shape!r}; expected a list of integers")
    sizes = tuple(shape)
    ranges = {each.axis: (each.min, each.max) for each in metadata.dynamic}
    fits = len(sizes) == len(metadata.shape)
    for axis, (size, expected) in enumerate(zip(sizes, metadata.shape, strict=False)):
        least, most = ranges.get(axis, (expected, expected))
        fits &= size >= least and (most is None or size <= most)
    if not fits:
        raise invalid(f"input {name!r} has shape {list(sizes)}; expected {describe_shape(metadata)}")
    return sizes


def describe_shape(metadata: Metadata) -> str:
    """Return a shape with the range of each dynamic dimension: `[1..64, 16]`."""
    ranges = {each.axis: f"{each.min}..{'' if each.max is None else each.max}" for each in metadata.dynamic}
    return f"[{', '.join(ranges.get(axis, str(size)) for axis, size in enumerate(metadata.shape))}]"


def from_bytes(metadata: Metadata, shape: tuple[int, ...], content: bytes | memoryview) -> Tensor:
    """Return an input that came as bytes: row by row, little-endian."""
    dtype = DTYPES[metadata.datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise invalid(
            f"input {metadata.name!r} has {len(content)} bytes; {metadata.datatype} of {list(shape)} has {expected}"
        )
    if not expected:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # a bool of 2 is not defined
        return torch.from_numpy(np.frombuffer(content, np.uint8) != 0).reshape(shape)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def from_numbers(metadata: Metadata, shape: tuple[int, ...], data: Any) -> Tensor:
    """Return an input that came as numbers, in one list or in nested ones."""
    name, word = metadata.name, metadata.datatype
    dtype = DTYPES[word]
    numbers = _flat(data, len(shape))
    if len(numbers) != math.prod(shape):
        raise invalid(f"input {name!r} has {len(numbers)} numbers; {list(shape)} has {math.prod(shape)}")
    kinds: tuple[type, ...] = (bool,) if dtype == torch.bool else (int, float) if dtype.is_floating_point else (int,)
    for number in numbers:
        if type(number) not in kinds:
            wanted = {bool: "true or false", int: "integers"}.get(kinds[-1], "numbers")
            raise invalid(f"input {name!r} holds {str(number)[:40]!r}; {word} takes {wanted}")
    try:
        made = torch.tensor(numbers, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise invalid(f"input {name!r} holds numbers that are no {word}: {str(error).splitlines()[0]}") from error
    if dtype.is_floating_point is False and dtype != torch.bool and numbers:
        bounds = torch.iinfo(dtype)
        if min(numbers) < bounds.min or max(numbers) > bounds.max:
            raise invalid(f"input {name!r} holds numbers outside {bounds.min} to {bounds.max}, those of {word}")
    if dtype.is_floating_point and not _is_finite(made) and all(map(math.isfinite, numbers)):
        raise invalid(f"input {name!r} holds numbers beyond {torch.finfo(dtype).max:g}, the largest of {word}")
    return made.reshape(shape)


def _flat(data: Any, deepest: int) -> list[Any]:
    """Return the numbers of lists that are nested at most so deep; those of one level, the usual ones, are not copied.

    Each level takes a pass over all numbers, so that more levels than a shape has dimensions could take minutes.
    """
    if not isinstance(data, list):
        raise invalid(f"'data' is {str(data)[:40]!r}; expected a list of numbers")
    numbers: list[Any] = data
    for _ in range(deepest):
        if not any(type(each) is list for each in numbers):
            break
        numbers = [each for inner in numbers for each in (inner if type(inner) is list else [inner])]
    return numbers


def to_bytes(tensor: Tensor) -> bytes:
    """Return a result's bytes: row by row, little-endian."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def to_numbers(name: str, tensor: Tensor) -> list[Any]:
    """Return a result's numbers in one list, for JSON."""
    if tensor.dtype.is_floating_point and not _is_finite(tensor):
        raise invalid(
            f"output {name!r} holds NaN or infinity, for which JSON has no number: ask for it with the parameter "
            "binary_data true, or by gRPC"
        )
    numbers: list[Any] = tensor.reshape(-1).tolist()
    return numbers


def complete(manifest: Manifest, inputs: Mapping[str, Tensor], outputs: Sequence[str], identity: str) -> Request:
    """Return a request, if no input is missing and all outputs that it names are there."""
    for each in manifest.inputs:
        if each.name not in inputs:
            raise invalid(f"input {each.name!r} is missing; expected {each.datatype} of {describe_shape(each)}")
    known = [each.name for each in manifest.outputs]
    for name in outputs:
        if name not in known:
            raise invalid(f"there is no output {name!r}; expected {', '.join(known)}")
    return Request(inputs, tuple(outputs) or tuple(known), identity)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether there is neither NaN nor infinity, by NumPy.

    torch would share the work with threads of this one's, which the model's own then share processors with.
    """
    if tensor.dtype == torch.bfloat16:
        exponents = tensor.contiguous().view(torch.int16).numpy() & 0x7F80
        return not bool((exponents == 0x7F80).any())
    return bool(np.isfinite(tensor.numpy()).all())
