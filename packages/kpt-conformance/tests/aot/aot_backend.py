"""What the tests of the matrix share: a backend made of samples, and what to do without a compiler."""

import os
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from kpt_core import Backend, Kernel

#: Where the sample kernels that can run would be; nothing of it is called.
TARGET = "aot_backend:matmul"


class SampleBackend(Backend):
    """Offers one kernel for each attribute that is to be compiled."""

    name = "sample"
    device_types = ("cuda",)

    def __init__(self, aot: tuple[str, ...], chips: tuple[str, ...]) -> None:
        self.aot, self.chips = aot, chips

    def unavailable(self) -> str | None:
        return "it is never there"

    def kernels(self) -> Iterable[Kernel]:
        return [Kernel("aot.matmul", f"{TARGET}_{index}", aot=aot) for index, aot in enumerate(self.aot)]


def need(*packages: str) -> None:
    """Skip without a compiler, except where the session is there for it (`nox -s aot`)."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        reason = f"{', '.join(missing)} not installed; `nox -s aot` runs this"
        if os.environ.get("KPT_AOT") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
