"""What the choice of a kernel costs: a call of an op minus a call of its kernel, in microseconds.

`python bench_dispatch.py` prints the medians; `pytest bench_dispatch.py` measures the calls with pytest-benchmark.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import kpt_core
import kpt_core.registry

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

#: Calls that are timed together, short enough that most such stretches pass without an interruption.
CALLS = 200


@kpt_core.op("bench.same")
def same(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """Do nothing, so that only dispatch is measured."""
    return x


@kpt_core.op("bench.written", mutates=("x",))
def written(x: Tensor, weight: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
    """Do nothing, though it says that it changes x."""
    return x


def kernel(call: kpt_core.Call) -> Tensor:
    """Do nothing, as a kernel."""
    return call.x  # type: ignore[no-any-return]


def accept(call: kpt_core.Call) -> str | None:
    """Refuse large inputs, as kernels do."""
    return None if call.x.shape[0] <= 8 else "more than 8 rows"


class Bench(kpt_core.Backend):
    """A backend of one kernel."""

    name = "bench"
    device_types = ("cpu",)

    def __init__(self, unsupported: str | None) -> None:
        self.unsupported = unsupported

    def kernels(self) -> Iterable[kpt_core.Kernel]:
        """Offer the kernel."""
        target = f"{__name__}:kernel"
        return [kpt_core.Kernel(op, target, unsupported=self.unsupported) for op in ("bench.same", "bench.written")]


@contextmanager
def added(unsupported: str | None = None) -> Iterator[None]:
    """Offer the kernel inside the block."""
    kpt_core.registry.add_backend(Bench(unsupported))
    try:
        yield
    finally:
        kpt_core.registry.remove_backend("bench")


#: The way whose op changes an argument.
WRITES = "kernel of an op that changes an argument"
#: Ways through dispatch: what opens the block in which the call is measured.
PATHS: dict[str, tuple[Callable[[], AbstractContextManager[None]], ...]] = {
    "kernel that takes every call": (added,),
    WRITES: (added,),
    "kernel that may refuse": (lambda: added(f"{__name__}:accept"),),
    "reference": (nullcontext,),
    "kernel asked for by use()": (added, lambda: kpt_core.use("bench")),
}


def seconds(call: Callable[..., Tensor], *args: object) -> float:
    """Time of one call, averaged over a stretch of them."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call(*args)
    return (time.perf_counter() - begin) / CALLS


def overhead(op: Callable[..., Tensor], repeats: int = 300) -> float:
    """Return the median microseconds that a call of an op takes longer than one of its kernel, both timed in turn."""
    x = torch.ones(4)
    call = same.bind(x, x)
    seconds(op, x, x), seconds(kernel, call)
    return statistics.median(seconds(op, x, x) - seconds(kernel, call) for _ in range(repeats)) * 1e6


def overheads(repeats: int = 300) -> dict[str, float]:
    """Overhead of every path, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    try:
        for path, (outer, *inner) in PATHS.items():
            with outer(), inner[0]() if inner else nullcontext():
                found[path] = overhead(written if path == WRITES else same, repeats)
    finally:
        torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("path", PATHS)
def test_call(benchmark: "BenchmarkFixture", path: str) -> None:
    """Measure whole calls with pytest-benchmark."""
    x = torch.ones(4)
    outer, *inner = PATHS[path]
    with outer(), inner[0]() if inner else nullcontext():
        assert benchmark(written if path == WRITES else same, x, x) is x


def main() -> None:
    """Print the medians and where they were measured."""
    machine = platform.processor() or platform.machine()
    where = f"{machine}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"dispatch overhead in microseconds, median, 1 thread ({where})")  # noqa: T201
    for path, median in overheads().items():
        print(f"{median:8.2f}  {path}")  # noqa: T201


if __name__ == "__main__":
    main()
