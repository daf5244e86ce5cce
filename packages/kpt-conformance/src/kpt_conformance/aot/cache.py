"""Readings of earlier runs, one small file each, named by the hash of all that they depend on."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from kpt_core.files import write_whole

from .reading import Reading


def default_folder() -> Path:
    """`kpt/aot` in the user's cache folder (`$XDG_CACHE_HOME`, or `~/.cache`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kpt" / "aot"


def load_reading(folder: Path, key: str) -> Reading | None:
    """The reading of that key, None if there is none or its file is damaged: it is then read anew."""
    try:
        values = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        return Reading(**{**values, "notes": tuple(values["notes"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def save_reading(folder: Path, key: str, reading: Reading) -> None:
    """Keep a reading; processes may do so at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{key}.json", json.dumps(asdict(reading)))
