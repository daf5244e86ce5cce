"""A pytest plugin: of all processes that hold it, one at a time has a large case in the device's memory."""

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

#: The environment variable that names the file which is locked.
LOCK = "KPT_GPU_LOCK"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait until no other process has a large case."""
    called = getattr(item, "callspec", None)
    values = [] if called is None else called.params.values()
    if not any(value.case.large for value in values if hasattr(value, "case")):
        return (yield)
    import torch

    with Path(os.environ[LOCK]).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
