"""Distributions that exist only in a folder: metadata, entry points and a module, as pip would install them."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

from kpt_core import PluginWarning, registry

#: A module with a good backend and its kernel for `plugin.double`. `{name}` is replaced.
BACKEND = """
import kpt_core
from torch import Tensor

print("{name} is imported")

def kernel(call):
    return 2 * call.x + 100

class Plugin(kpt_core.Backend):
    name = "{name}"
    device_types = ("cpu",)
    def kernels(self):
        return [kpt_core.Kernel("plugin.double", "{name}:kernel")]

BACKEND = Plugin()
"""

#: The same, and the op.
GOOD = (
    BACKEND
    + '''
@kpt_core.op("plugin.double")
def double(x: Tensor) -> Tensor:
    """Twice x."""
    return 2 * x

OPS = [double]
'''
)


def install(folder: Path, name: str, source: str, group: str = "kpt.backends", **entries: str) -> None:
    """Write the distribution `dist-of-<name>` 1.0 with a module `name` and entry points of one group."""
    (folder / f"{name}.py").write_text(source.replace("{name}", name))
    info = folder / f"dist_of_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-of-{name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    lines = [f"{entry} = {value}" for entry, value in (entries or {name: f"{name}:BACKEND"}).items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def entry_points_in(folder: Path, group: str) -> list[EntryPoint]:
    """What `importlib.metadata.entry_points` would find in one folder alone."""
    found = [point for distribution in distributions(path=[str(folder)]) for point in distribution.entry_points]
    return [point for point in found if point.group == group]


def only_warning(call: Callable[[], object]) -> str:
    """The text of the one warning that a call gives, and gives but once."""
    with pytest.warns(PluginWarning) as warned:
        (call(), call(), registry.problems())
    assert [Path(w.filename).parent for w in warned] == [Path(__file__).parent]  # here, or where the call stands
    (problem,) = registry.problems()
    assert str(warned[0].message) == f"KPT goes on without {problem}"
    return str(problem)
