"""The benchmarks of `--kpt-bench`: each is an entry of pytest-benchmark."""

from typing import ClassVar

import pytest

from .benchmarks import Measured


class TestSpeed:
    """How fast every kernel of the backend is that `--kpt-backend` names."""

    is_kpt_benchmark: ClassVar[bool] = True

    def test_speed(self, measured: Measured, request: pytest.FixtureRequest) -> None:
        """A kernel is right on a case, and takes so long."""
        measured.check()
        measured.measure(request.getfixturevalue("benchmark"))  # which warns where it is not used
