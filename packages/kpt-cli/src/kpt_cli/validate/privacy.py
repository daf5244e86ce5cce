"""Leaving a user's folders out of a report, which is made to be published."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def folders(work: Path) -> dict[str, str]:
    """Return the folders whose names tell of the user, with what a report says in their place.

    Args:
        work: Where the steps run.
    """
    named = {str(Path(entry).absolute()): "{source}" for entry in sys.path if entry and Path(entry).is_dir()}
    # What is installed says so by its environment, and a system's own Python lies at the same place everywhere.
    installed = (sys.prefix, sys.base_prefix)
    named = {path: name for path, name in named.items() if not any(map(Path(path).is_relative_to, installed))}
    named |= {str(Path.home()): "~", str(Path.cwd()): "{here}"}
    if sys.prefix != sys.base_prefix:
        named[sys.prefix] = "{environment}"
    named[str(work)] = "{work}"
    named |= {str(Path(path).resolve()): name for path, name in named.items()}
    return {path: name for path, name in named.items() if path != Path(path).anchor}


def hider(named: Mapping[str, str]) -> Callable[[bytes], bytes]:
    """Return a function that puts names in the place of folders in a text, the longest folder that fits first."""
    names = {path.encode(): name.encode() for path, name in named.items()}
    paths = b"|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
    # Whole names alone: /home/me is no part of /home/meadow, nor of /mnt/home/me.
    pattern = re.compile(rb"(?<![\w.-])(" + paths + rb")(?![\w-])")
    return lambda text: pattern.sub(lambda found: names[found[1]], text)
