"""Clients and a server that others wrote, in an environment of their own: `nox -s serve`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oip"))

from serving import Server, export


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("packages") / "toy")


@pytest.fixture(scope="session")
def server(package: Path) -> Iterator[Server]:
    with Server(package) as running:
        yield running
