"""The matrix of sample kernels, compiled once for all tests that ask for the same."""

from collections.abc import Callable

import pytest
from aot_backend import SampleBackend

from kpt_conformance.aot import Row, run
from kpt_core import registry

Matrix = Callable[..., list[Row]]


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    def compiled(aot: str, *chips: str, **options: object) -> list[Row]:
        registry.add_backend(SampleBackend((aot,), chips))
        try:
            return run(backends=["sample"], **options)
        finally:
            registry.remove_backend("sample")

    return compiled
