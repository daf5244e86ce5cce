"""A pytest plugin: of all processes that hold it, one at a time has a large case in the device's memory."""

import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

#: The environment variable that names the file which is locked.
LOCK = "KPT_GPU_LOCK"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait until no other process has a large case, outside of the time that a test is given."""
    called = getattr(item, "callspec", None)
    values = [] if called is None else called.params.values()
    if not any(value.case.large for value in values if hasattr(value, "case")):
        return (yield)
    import torch

    with Path(os.environ[LOCK]).open("w") as handle:
        if not _locked(handle.fileno(), item.config.getoption("--gpu-deadline")):
            item.add_marker(pytest.mark.skip("the time was over, spent on other large cases"))
        try:
            return (yield)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _locked(handle: int, deadline: float) -> bool:
    """Return whether the file became ours before the deadline, 0 for none."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline and time.time() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True
