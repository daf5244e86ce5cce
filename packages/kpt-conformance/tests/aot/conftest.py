"""The matrix of sample kernels: compiled once, in a cache of its own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aot_backend import SampleBackend

from kpt_conformance.aot import Row, run
from kpt_conformance.aot.cache import default_folder
from kpt_core import registry

Matrix = Callable[..., list[Row]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the session that has the compilers, what was read there before is not compiled again."""
    return default_folder() / "samples" if os.environ.get("KPT_AOT") == "1" else tmp_path_factory.mktemp("aot")


def run_samples(aot: str, *chips: str, cache: Path, **options: object) -> list[Row]:
    registry.add_backend(SampleBackend((aot,), chips))
    try:
        return run(backends=["sample"], cache=cache, **options)
    finally:
        registry.remove_backend("sample")


@pytest.fixture(scope="session")
def matrix(cache: Path) -> Matrix:
    return lambda aot, *chips, **options: run_samples(aot, *chips, **{"cache": cache, **options})
