"""Tests of kernels are skipped where there is no library to test, for the reason that the backend gives."""

import pytest

from kpt_backend_cpu import BACKEND


@pytest.fixture
def kernels():
    reason = BACKEND.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return {kernel.target.rpartition(":")[2]: kernel.load() for kernel in BACKEND.kernels()}
