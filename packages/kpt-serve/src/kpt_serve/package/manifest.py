"""`kpt-package.json`, a package's manifest: what the model is, what it needs, and every file with its checksum.

Nothing here imports torch, so that a package that is damaged, foreign or for another machine is told in a sentence.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from kpt_serve.errors import PackageError

from .fields import (
    AGAIN,
    Fields,
    choice,
    identifier,
    is_plain,
    parse_json,
    plain_name,
    text,
    unique_list,
    version_range,
    whole,
    wrong,
)

NAME = "kpt-package.json"
FORMAT = 1
#: Bytes of a manifest; one of a model of 500 shards has 60 KB.
LARGEST = 4 << 20
#: Files that may be in the folder and are not in the list: a signature covers the manifest, so it is made after it.
UNLISTED = (NAME, "model.sig")
KINDS = ("program", "transformers")
#: Types of the Open Inference Protocol v2, and BF16 as Triton names it.
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Dimension:
    """The sizes that a dynamic dimension takes: the place in `shape` that is -1, the smallest and the largest."""

    axis: int
    min: int
    max: int | None = None


@dataclass(frozen=True)
class Tensor:
    """An input or output in the words of the Open Inference Protocol v2, with the range of each dynamic dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    dynamic: tuple[Dimension, ...] = ()


@dataclass(frozen=True)
class RequiredOp:
    """An op that the program calls, and the distribution that declares it, with its range: `>=0.1,<0.2`."""

    name: str
    distribution: str
    versions: str


@dataclass(frozen=True)
class Distribution:
    """A distribution that the model needs, and its range."""

    name: str
    versions: str


@dataclass(frozen=True)
class File:
    """A file of the package: its path in the folder, its bytes and their SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may be from the exporter's: its mean and largest error, as multiples of the exporter's own."""

    mean: float
    max: float


@dataclass(frozen=True)
class Manifest:
    """What `kpt-package.json` says of a package, in format 1.

    `read` it, then `check` the folder and `check_machine` (`kpt_serve.package.checking`).
    """

    name: str
    kind: Literal["program", "transformers"]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ops: tuple[RequiredOp, ...]
    device_types: tuple[str, ...]
    dtypes: tuple[str, ...]
    distributions: tuple[Distribution, ...]
    tolerance: Tolerance
    files: tuple[File, ...]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """Return the manifest of a package.

        Raises:
            PackageError: The file can't be read, or says something else than format 1 allows; it names the key.
        """
        path = Path(folder, NAME)
        return cls.parse(parse_json(_content(path), str(path)), str(path))

    @classmethod
    def parse(cls, document: object, place: str = NAME) -> Self:
        """Return the manifest that a JSON document is; errors begin with `place`."""
        if isinstance(document, dict) and document.get("format") != FORMAT:
            found = document.get("format")
            hint = "install a newer kpt-serve" if type(found) is int and found > FORMAT else AGAIN
            raise PackageError(f"{place}: 'format' is {found!r}; this kpt-serve reads {FORMAT}: {hint}")
        fields = Fields(document, place)
        fields.take("format", whole)
        kind = fields.take("kind", choice(KINDS))
        manifest = cls(
            name=fields.take("name", plain_name),
            kind=kind,
            inputs=fields.take("inputs", unique_list(_tensor, "name")),
            outputs=fields.take("outputs", unique_list(_tensor, "name")),
            ops=fields.take("ops", unique_list(_required_op, "name")),
            device_types=fields.take("device_types", unique_list(identifier)),
            dtypes=fields.take("dtypes", unique_list(identifier)),
            distributions=fields.take("distributions", unique_list(_distribution, "name")),
            tolerance=fields.take("tolerance", _tolerance),
            files=fields.take("files", unique_list(_file_of(kind), "path")),
        )
        fields.end()
        return manifest

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest as it is written."""
        return {"format": FORMAT, **_plain(asdict(self))}

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write the manifest into a package's folder and return its path; what it says must be what `read` allows."""
        document = self.as_dict()
        path = Path(folder, NAME)
        type(self).parse(document, str(path))
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


def describe_file(folder: str | os.PathLike[str], path: str) -> File:
    """Return what a manifest says of a file of the folder; `path` has slashes on every system."""
    with open(Path(folder, path), "rb") as file:
        return File(path, os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _content(path: Path) -> bytes:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(f"{path} is no plain file; expected a manifest: {AGAIN}")
        if status.st_size > LARGEST:
            raise PackageError(f"{path} has {status.st_size} bytes; a manifest has at most {LARGEST}: {AGAIN}")
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PackageError(
            f"{path} can't be read: {reason}; expected the folder of a package, which holds {NAME}"
        ) from error


def _plain(value: Any) -> Any:
    """Return a value with lists where it has tuples, as JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _required_op(value: Any, place: str) -> RequiredOp:
    fields = Fields(value, place)
    op = RequiredOp(
        fields.take("name", identifier), fields.take("distribution", identifier), fields.take("versions", version_range)
    )
    fields.end()
    return op


def _distribution(value: Any, place: str) -> Distribution:
    fields = Fields(value, place)
    distribution = Distribution(fields.take("name", identifier), fields.take("versions", version_range))
    fields.end()
    return distribution


def _dimension(value: Any, place: str) -> Dimension:
    fields = Fields(value, place)
    dimension = Dimension(
        fields.take("axis", whole),
        fields.take("min", whole),
        fields.take("max", lambda value, place: None if value is None else whole(value, place)),
    )
    fields.end()
    if dimension.min < 0 or (dimension.max is not None and dimension.max < dimension.min):
        raise wrong(place, value, "0 <= min <= max")
    return dimension


def _size(value: Any, place: str) -> int:
    if whole(value, place) < -1:
        raise wrong(place, value, "a size, or -1 for a dynamic one")
    return int(value)


def _sizes(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong(place, value, "a list")
    return tuple(_size(each, f"{place}[{index}]") for index, each in enumerate(value))


def _tensor(value: Any, place: str) -> Tensor:
    fields = Fields(value, place)
    tensor = Tensor(
        fields.take("name", text),
        fields.take("datatype", choice(DATATYPES)),
        fields.take("shape", _sizes),
        fields.take("dynamic", unique_list(_dimension, "axis")),
    )
    fields.end()
    axes = [axis for axis, size in enumerate(tensor.shape) if size == -1]
    if sorted(dimension.axis for dimension in tensor.dynamic) != axes:
        found = [dimension.axis for dimension in tensor.dynamic]
        raise wrong(f"{place}: 'dynamic'", found, f"a range for each -1 of 'shape', at {axes}")
    return tensor


def _tolerance(value: Any, place: str) -> Tolerance:
    fields = Fields(value, place)
    tolerance = Tolerance(fields.take("mean", _factor), fields.take("max", _factor))
    fields.end()
    return tolerance


def _factor(value: Any, place: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 1:
        raise wrong(place, value, "a number of at least 1: a multiple of the exporter's own error")
    return float(value)


def _file_of(kind: str) -> Callable[[Any, str], File]:
    """Return a parser of a file's entry; programs have no folders in theirs."""

    def path(value: Any, place: str) -> str:
        parts = value.split("/") if isinstance(value, str) else []
        if not parts or not all(map(is_plain, parts)) or value in UNLISTED:
            raise wrong(
                place, value, f"a path inside the folder of plain names, and not {' or '.join(sorted(UNLISTED))}"
            )
        if len(parts) > 1 and kind == "program":
            raise wrong(place, value, "a plain file name: packages of kind 'program' have no folders")
        return str(value)

    def size(value: Any, place: str) -> int:
        if whole(value, place) < 0:
            raise wrong(place, value, "a number of bytes")
        return int(value)

    def sha256(value: Any, place: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise wrong(place, value, "64 hexadecimal digits in lower case")
        return value

    def parse(value: Any, place: str) -> File:
        fields = Fields(value, place)
        file = File(fields.take("path", path), fields.take("size", size), fields.take("sha256", sha256))
        fields.end()
        return file

    return parse
