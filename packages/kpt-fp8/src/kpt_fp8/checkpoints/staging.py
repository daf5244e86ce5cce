"""A checkpoint that is written: files of bounded size and an index, in a folder that appears whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from kpt_core import InputError

from .folder import CONFIG, INDEX, QUANT_CONFIG, SINGLE

#: What belongs to a model beside its weights: tokenizers, chat templates, licence, code of its own.
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")

MODULES = "modules.json"  #: sentence-transformers' list of what a model is made of


def check_target(source: Path, target: Path) -> Path:
    """The real path of a target that may be written."""
    real, origin = target.resolve(), source.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise InputError(f"{target} overlaps the source {source}; expected a folder apart from it: choose another")
    if real.exists() and (not real.is_dir() or any(real.iterdir())):
        raise InputError(f"{target} exists already; expected a new or empty folder: choose another, or remove it")
    if not real.parent.is_dir():
        raise InputError(f"{target}: the folder {real.parent} does not exist: make it first")
    return real


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `InputError` where what the block writes can't be written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} can't be written ({error}): make room there, or choose another place") from error


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place at the end, or vanishes if the block raises."""
    staging = target.parent / f".{target.name}.{os.urandom(4).hex()}.partial"
    with writing(staging):
        staging.mkdir()
    try:
        yield staging
        with writing(target):
            staging.rename(target)  # over an empty folder too
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def copy_rest(source: Path, target: Path) -> None:
    """Copy what belongs to the model beside its weights and what describes them.

    Of folders inside it goes the same; those that sentence-transformers' `modules.json` names go whole, since their
    weights are no part of the model's.
    """
    left = {source / name for name in (CONFIG, INDEX, QUANT_CONFIG)}
    found = {file for pattern in COPIED for file in source.rglob(pattern)}
    for folder in _modules(source):
        found.update(folder.rglob("*"))
    for file in sorted(found - left):
        inside = file.relative_to(source)
        if file.is_file() and not any(part.startswith(".") for part in inside.parts):
            with writing(target / inside):
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / inside)


def _modules(source: Path) -> list[Path]:
    """Return the folders inside a checkpoint that are modules of sentence-transformers beside the model."""
    try:
        named = [str(each.get("path") or "") for each in json.loads((source / MODULES).read_text(encoding="utf-8"))]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # there is none, or it is something else by that name
    root = source.resolve()
    return [source / name for name in named if name and root in (source / name).resolve().parents]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, as transformers lays it out."""
    with writing(path):
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardWriter:
    """Collect tensors and write a file whenever they fill one; a larger one has its own. `finish` ends that."""

    def __init__(self, folder: Path, metadata: dict[str, str], most: int) -> None:
        self._folder, self._metadata, self._most = folder, metadata, most
        self._held: dict[str, Tensor] = {}
        self._size = 0
        self._files: list[list[str]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, to be written with others."""
        if self._held and self._size + tensor.nbytes > self._most:
            self._write()
        self._held[name] = tensor.contiguous()
        self._size += tensor.nbytes
        self.total += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, name the files by their number, and write the index."""
        if self._held or not self._files:
            self._write()
        count = len(self._files)
        if count == 1:
            (self._folder / self._part(0)).rename(self._folder / SINGLE)
            return
        places = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / self._part(number)).rename(self._folder / final)
            places.update(dict.fromkeys(names, final))
        write_json(
            self._folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(places.items()))}
        )

    def _part(self, number: int) -> str:
        return f"part-{number}.safetensors"

    def _write(self) -> None:
        from safetensors.torch import save_file

        path = self._folder / self._part(len(self._files))
        with writing(path):
            path.touch()
            mode = path.stat().st_mode
            save_file(self._held, path, self._metadata)
            path.chmod(mode)  # safetensors' files are for their owner only, whatever the umask says
        self._files.append(list(self._held))
        self._held, self._size = {}, 0
