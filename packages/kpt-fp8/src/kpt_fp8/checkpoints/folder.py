"""A checkpoint on disk: `CheckpointFolder` reads headers at once, and a tensor when it is asked for."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kpt_core import InputError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Where ModelOpt writes what others have in config.json.
QUANT_CONFIG = "hf_quant_config.json"
_HINT = "download or write the checkpoint again"
#: A header is no longer, as safetensors has it.
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file; its dtype is as safetensors names it, `F8_E4M3` for instance."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a matrix of one expert is in a tensor of all: `stack[expert]`, transposed or not, and some rows of it."""

    stack: str
    expert: int
    rows: slice
    transposed: bool


class CheckpointFolder:
    """A folder with config.json and weights in safetensors, in one file or several with an index.

    Attributes:
        path: the folder.
        config: what config.json holds.
        files: names of the files with weights, in their order.
        tensors: by name, in the order of the files.
        faults: sentences about index and files; empty where all is well.
        cuts: by name of a tensor that is a part of another, which one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if gguf_files(self.path):
            raise InputError(
                f"{self.path} is GGUF; expected {CONFIG} and weights in safetensors: run kpt convert {self.path} OUT "
                "--to bfloat16 first"
            )
        if not self.path.is_dir():
            hub = (
                f": if that is a model of Hugging Face's hub, download it: hf download {path} --local-dir DIR"
                if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) and not self.path.exists()
                else ""
            )
            raise InputError(f"{self.path} is no folder; expected one with {CONFIG} and weights in safetensors{hub}")
        self.config = read_json(self.path / CONFIG)
        self.faults: list[str] = []
        self.tensors: dict[str, Stored] = {}
        self.cuts: dict[str, Cut] = {}
        index = self._index()
        self.files = tuple(dict.fromkeys(sorted(index.values()))) if index is not None else (SINGLE,)
        for file in self.files:
            self._read_header(file)
        if index is not None:
            self._compare(index)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """What the checkpoint says of its quantised weights; None where it has none."""
        found = self.config.get("quantization_config")
        if found is None and isinstance(self.config.get("text_config"), dict):
            found = self.config["text_config"].get("quantization_config")
        if found is None and (self.path / QUANT_CONFIG).is_file():
            found = read_json(self.path / QUANT_CONFIG)
        if found is not None and not isinstance(found, dict):
            raise InputError(f"{self.path / CONFIG}: quantization_config must be an object; got {found!r}: {_HINT}")
        if found and found.get("quant_method") == "fp8" and found.get("weight_block_size") is None:
            # AutoFP8 calls itself as another format is called; the names of scales tell them apart.
            ends = {name.rpartition(".")[2] for name in self.tensors}
            if "weight_scale" in ends and "weight_scale_inv" not in ends:
                return {**found, "quant_method": "autofp8"}
        return found

    @contextmanager
    def reading(self) -> Iterator["TensorReader"]:
        """Read tensors; files are opened when they are needed, one or two at a time."""
        reader = TensorReader(self)
        try:
            yield reader
        finally:
            reader.close()

    def _index(self) -> dict[str, str] | None:
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).exists():
                raise InputError(
                    f"{self.path} has neither {SINGLE} nor {INDEX}; expected weights in safetensors: save them so, "
                    "since other files may run code when they are read"
                )
            return None
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise InputError(f"{self.path / INDEX}: weight_map must give a file for each tensor: {_HINT}")
        outside = next((file for file in index.values() if Path(file).name != file), None)
        if outside is not None:
            raise InputError(f"{self.path / INDEX} names {outside!r}; expected files of the same folder: {_HINT}")
        return index

    def _read_header(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.path / file
        if not path.exists():
            self.faults.append(f"{path} is missing, which the index names: {_HINT}")
            return
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    part = opened.get_slice(name)
                    if name in self.tensors:
                        self.faults.append(f"{name} stands in {self.tensors[name].file} and in {file}: {_HINT}")
                    self.tensors[name] = Stored(name, file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            self.faults.append(_why_unreadable(path, error))

    def _compare(self, index: dict[str, str]) -> None:
        if self.faults:
            return
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file != file:
                self.faults.append(f"{self.path / INDEX} has {name} in {file}, where it is not: {_HINT}")
        for name, stored in self.tensors.items():
            if name not in index:
                self.faults.append(f"{self.path / INDEX} lacks {name}, which {stored.file} holds: {_HINT}")


class TensorReader:
    """Tensors by name; `CheckpointFolder.reading` makes one."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Any, Any]] = {}

    def tensor(self, name: str) -> Tensor:
        """A tensor, on the CPU."""
        from safetensors import SafetensorError

        file = self._folder.tensors[name].file
        cut = self._folder.cuts.get(name)
        try:
            if cut is not None:
                whole: Tensor = self._opened(file).get_slice(cut.stack)[cut.expert]
                return (whole.mT if cut.transposed else whole)[cut.rows].contiguous()
            tensor: Tensor = self._opened(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self._folder.path / file}: {name} can't be read ({error}): {_HINT}") from error
        return tensor

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._close(next(iter(self._open)))

    def _opened(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            while len(self._open) > 1:
                self._close(next(iter(self._open)))
            # Pages of a mapped file would stay with the process until it is closed.
            context = safe_open(self._folder.path / file, framework="pt", backend="pread")
            self._open[file] = context, context.__enter__()  # type: ignore[no-untyped-call]
        # The one used last is closed last.
        self._open[file] = self._open.pop(file)
        return self._open[file][1]

    def _close(self, file: str) -> None:
        self._open.pop(file)[0].__exit__(None, None, None)


def _why_unreadable(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that safetensors refused with this error, and what to do."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            header = stream.read(length if length <= _LARGEST_HEADER else 0)
    except PermissionError as failure:
        return f"{path} can't be read ({failure.strerror}): let this user read it"
    except OSError as failure:
        return f"{path} can't be read ({failure.strerror}): {_HINT}"
    if len(start) < 8 or not header.startswith(b"{"):
        return f"{path} is no safetensors file ({size:,} bytes without a valid header): {_HINT}"
    wanted, least = 8 + length, "at least "
    if size >= wanted:
        try:
            entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            wanted += max((int(entry["data_offsets"][1]) for entry in entries), default=0)
            least = ""
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return f"{path} is no safetensors file (its header can't be read: {error}): {_HINT}"
    if size == wanted:
        return f"{path} can't be read ({error}): {_HINT}"
    state = "truncated" if size < wanted else "too long"
    return f"{path} is {state}, its header needs {least}{wanted:,} bytes and it has {size:,}: {_HINT}"


def gguf_files(path: Path) -> list[Path]:
    """Return the files of GGUF at a path, which is one, or a folder without safetensors."""
    if path.is_file():
        return [path] if path.suffix == ".gguf" else []
    return [] if any((path / name).exists() for name in (SINGLE, INDEX)) else sorted(path.glob("*.gguf"))


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}): {_HINT}") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}): {_HINT}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object; got {type(found).__name__}: {_HINT}")
    return found
