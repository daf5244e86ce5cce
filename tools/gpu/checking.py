"""A pytest plugin of what all checks share: the setting, and the clocks of the device in each row."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rows import Row
from setting import Setting, served


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask a file for what its checks are given: `PARAMETERS` names a function of the setting for each argument."""
    for name, make in getattr(metafunc.module, "PARAMETERS", {}).items():
        if name in metafunc.fixturenames:
            found: dict[str, Any] = dict(make(Setting.of(metafunc.config)))
            metafunc.parametrize(name, list(found.values()), ids=list(found))


@pytest.fixture(scope="session")
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """Where the checks run, with a GPU's kernels in force."""
    made = Setting.of(request.config)
    with served(made):
        yield made


@pytest.fixture(autouse=True)
def clocks(request: pytest.FixtureRequest, setting: Setting) -> Iterator[None]:
    """Write clock, power and temperature as a check ends: what is throttled is no figure."""
    # Asked for before the check: what is asked for first is torn down last.
    row: Row | None = request.getfixturevalue("row") if "row" in request.fixturenames else None
    yield
    if setting.on_gpu:
        # Other processes need what this one keeps.
        torch.cuda.empty_cache()
    if setting.on_gpu and row is not None:
        from kpt_backend_nvidia import device_info

        live = device_info(setting.device).live
        if live is not None:
            row["clocks"] = {"MHz": live.clock, "W": live.power, "C": live.temperature}
