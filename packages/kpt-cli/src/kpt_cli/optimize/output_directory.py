"""Where an optimised model is written: beside its place first, then moved there, so that nobody sees half of it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from kpt_cli.errors import CliError
from kpt_cli.output_file import check_writable

from .model_directory import CONFIG, INDEX, ModelDirectory

PLAN = "kpt_plan.json"
#: What belongs to a model beside its weights: configs, tokenizers, chat templates, licence.
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*")


def check_output(out: Path, directory: ModelDirectory, *, force: bool) -> Path:
    """Check before any work that a model can be written to `out`; return the real path.

    Raises:
        CliError: it is taken, in a wrong place, or the disk has no room.
    """
    real, model = out.resolve(), directory.path.resolve()
    if real == model:
        raise CliError(f"--copy {out} is the model's own folder; choose another one")
    if model in real.parents:
        raise CliError(f"--copy {out} lies inside the model's folder {directory.path}; choose a place outside of it")
    if real in model.parents:
        raise CliError(f"--copy {out} contains the model's folder {directory.path}; choose another place")
    if real.exists() and not real.is_dir():
        raise CliError(f"--copy {out} is a file; expected a folder that does not exist yet")
    if real.is_dir() and any(real.iterdir()):
        if not force:
            raise CliError(f"--copy {out} exists and is not empty; choose another folder, or replace it with --force")
        if not (real / CONFIG).is_file():
            raise CliError(f"--copy {out} is not empty and holds no model, so --force does not replace it")
    if not real.parent.is_dir():
        raise CliError(f"--copy {out}: the folder {real.parent} does not exist; make it first")
    check_writable(real.parent, f"--copy {out}")
    needed, free = _bytes_to_copy(directory), shutil.disk_usage(real.parent).free
    if needed > free:
        raise CliError(
            f"--copy {out} needs {decimal(needed)} and the disk has {decimal(free)} free; make room or choose another"
        )
    return real


@contextmanager
def staged(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `out` that takes its place at the end of the block, or vanishes if the block raises.

    Args:
        out: the place, a real path.
        replace: whether what is there by then gives way; otherwise the block ends in an `OSError` if it is not empty.
    """
    staging = out.parent / f".{out.name}.{os.getpid()}.partial"
    staging.mkdir()
    try:
        yield staging
        if replace and out.exists():
            _exchange(staging, out)
        else:
            staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _exchange(staging: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.{os.getpid()}.old"
    out.rename(old)
    try:
        staging.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)


def copy_model(directory: ModelDirectory, to: Path, dtype: str) -> None:
    """Copy the model's files; its weights are not changed by a byte.

    Args:
        directory: the model.
        to: an empty folder.
        dtype: written to the config unless it is `auto`: the plan was measured in it.
    """
    for file in _files(directory):
        shutil.copyfile(file, to / file.name)
    if dtype != "auto":
        config = {key: value for key, value in directory.config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _files(directory: ModelDirectory) -> list[Path]:
    found = {file for pattern in COPIED for file in directory.path.glob(pattern) if file.is_file()}
    found -= {directory.path / PLAN}
    sharded = any(file.name != "model.safetensors" for file in directory.weights)
    if not sharded:
        found -= {directory.path / INDEX}
    return sorted(found | set(directory.weights))


def _bytes_to_copy(directory: ModelDirectory) -> int:
    return sum(file.stat().st_size for file in _files(directory))
