"""Check that a folder is a whole Hugging Face model with safetensors weights, without importing anything heavy."""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kpt_cli.console import some
from kpt_cli.errors import CliError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")  #: files that unpickling would load; they are never opened
LARGEST_HEADER = 100_000_000  #: larger headers are refused by the safetensors library too
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A folder whose config and weights are complete."""

    path: Path  # the folder
    config: dict[str, Any]  # what its config.json says
    weights: tuple[Path, ...]  # the safetensors files, in name order
    weight_bytes: int  # their size

    @property
    def architecture(self) -> str | None:
        """Return the model class that the config names, if any."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None


def read_model_directory(path: Path) -> ModelDirectory:
    """Check a folder without loading it; `CliError` says what is missing, half-written or refused, and what to do."""
    config = read_config(path)
    weights = tuple(sorted(_find_weights(path)))
    size = sum(file.stat().st_size for file in weights)
    return ModelDirectory(path=path, config=config, weights=weights, weight_bytes=size)


def read_config(path: Path, *, alone: bool = False) -> dict[str, Any]:
    """Return what the config of a folder says; of a file if the config `alone` is wanted."""
    file = path
    if not (alone and path.is_file()):
        _check_folder(path)
        file = path / CONFIG
    if not file.is_file():
        below = sorted(found.parent for found in path.glob(f"*/{CONFIG}"))
        hint = f"; did you mean {' or '.join(map(str, below[:3]))}?" if below else ""
        raise CliError(f"{path} has no {CONFIG}; expected the folder of a Hugging Face model{hint}")
    config = _read_json(file)
    if not isinstance(config, dict):
        raise CliError(f"{file} holds a {type(config).__name__}; expected a JSON object that names a model_type")
    if not isinstance(config.get("model_type"), str):
        raise CliError(
            f"{file} names no model_type, so the architecture is unknown; take the file of the original model"
        )
    return config


def _check_folder(path: Path) -> None:
    if path.is_file():
        raise CliError(f"{path} is a file; expected the folder of a Hugging Face model, with {CONFIG} in it")
    if not path.is_dir():
        parent = path.absolute().parent
        beside = [entry.name for entry in os.scandir(parent) if entry.is_dir()] if parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=3, cutoff=0.6)
        hint = f"; beside it lies {' and '.join(str(path.parent / name) for name in near)}" if near else ""
        raise CliError(
            f"{path} does not exist{hint}; expected the folder of a Hugging Face model on this machine "
            f"(`hf download ORG/NAME --local-dir {path.name}` fetches one)"
        )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise CliError(f"{file} is not text; expected JSON; fetch the file again") from None
    except json.JSONDecodeError as error:
        if file.stat().st_size == 0:
            raise CliError(f"{file} is empty; fetch the file again") from None
        raise CliError(
            f"{file} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); fetch the file again"
        ) from None


def _find_weights(path: Path) -> list[Path]:
    single, index = path / WEIGHTS, path / INDEX
    if single.is_file():
        check_safetensors(single)
        return [single]
    if index.is_file():
        return _sharded(path, index)
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise CliError(
            f"{path} has its weights only as a pickle ({pickles[0]}), which can run code when it is loaded and is "
            f"refused; convert it to safetensors in a place where you trust it (`model.save_pretrained(...)` writes "
            f"safetensors), or fetch the model's safetensors files"
        )
    if others := sorted(file.name for file in path.glob("*.safetensors")):
        raise CliError(
            f"{path} has {some(others)} but neither {WEIGHTS} nor {INDEX}; fetch the missing file: without it nobody "
            "knows which files make up the model"
        )
    raise CliError(f"{path} has a {CONFIG} but no weights; expected {WEIGHTS} or {INDEX} beside it; fetch them again")


def _sharded(path: Path, index: Path) -> list[Path]:
    document = _read_json(index)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CliError(f"{index} has no weight_map; expected tensor names and the files that hold them; fetch it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or name in (".", ".."):
            raise CliError(f"{index} names the file {name!r}; expected plain file names in the same folder")
    if missing := [name for name in names if not (path / name).is_file()]:
        raise CliError(
            f"{index.name} names {len(names)} files, and {path} lacks {some(missing)}: the download is not complete; "
            "fetch what is missing"
        )
    for name in names:
        held = check_safetensors(path / name)
        if lost := sorted(tensor for tensor, shard in weight_map.items() if shard == name and tensor not in held):
            raise CliError(f"{path / name} lacks {some(lost)}, which {index.name} says it holds; fetch both again")
    return [path / name for name in names]


def check_safetensors(file: Path) -> set[str]:
    """Return the names of a safetensors file's tensors; `CliError` if its header does not fit its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if (start + stream.read(len(LFS_POINTER) - 8)).startswith(LFS_POINTER):
            raise CliError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in that folder")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= LARGEST_HEADER:
            raise CliError(f"{file} is not a safetensors file ({size:,} bytes without a valid header); fetch it again")
        stream.seek(8)
        header = stream.read(length)
    if len(header) < length:
        raise CliError(
            f"{file} is truncated: its header alone needs {8 + length:,} bytes and it has {size:,}; fetch it again"
        )
    try:
        tensors = {
            name: entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"
        }
        wanted = 8 + length + max((int(end) for end in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CliError(f"{file} is not a safetensors file: its header can't be read; fetch it again") from None
    if size != wanted:
        state = "truncated" if size < wanted else "too long"
        raise CliError(f"{file} is {state}: its header needs {wanted:,} bytes and it has {size:,}; fetch it again")
    return set(tensors)
