"""Ray Serve in an environment of its own: `nox -s ray`. What each event cost is told at the end."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oip"))

from load import ROWS

# This folder's own name makes an empty `ray` of it where there is no other.
if (found := find_spec("ray")) is None or found.origin is None:
    collect_ignore = ["test_ray.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for row in ROWS:
        terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from serving import export

    return export(tmp_path_factory.mktemp("packages") / "toy")
