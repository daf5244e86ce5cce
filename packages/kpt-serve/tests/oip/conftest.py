"""A package, and a server that most tests ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server, export


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("packages") / "toy")


@pytest.fixture(scope="module")
def server(package: Path) -> Iterator[Server]:
    with Server(package) as running:
        yield running
