"""What the shell completes; nothing heavy is imported, so that it answers while somebody types."""

import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from .plugins import OPS

#: Types of devices that torch has a name for.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "xla", "hpu", "mtia")

_NAME = re.compile(r'(?:\bop\(\s*|\b_?NAME\s*=\s*)"(\w+(?:\.\w+)+)"')


def one_of(names: Sequence[str]) -> Callable[[], Sequence[str]]:
    """A completer for these names."""
    return lambda: names


def op_names() -> list[str]:
    """Names of ops, read from the source of the packages that offer some: importing them would cost seconds."""
    found: set[str] = set()
    for entry in entry_points(group=OPS):
        spec = find_spec(entry.module.partition(".")[0])
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        if spec is not None and not places and spec.origin:
            found.update(_NAME.findall(Path(spec.origin).read_text(encoding="utf-8")))
        for file in (file for place in places for file in place.glob("*.py")):
            found.update(_NAME.findall(file.read_text(encoding="utf-8")))
    return sorted(found)
