"""A device of a benchmark: its best rates, graphs of calls, and the GPU's kernels interpreted where there is none."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kpt_core import Backend, Kernel
from kpt_core.registry import add_backend, remove_backend

Call = Callable[[], Any]
#: Where a system does not tell how large its last cache is.
_USUAL_CACHE = 32 * 2**20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Work:
    """What no implementation of a call can avoid.

    Attributes:
        flops: multiplications and additions of its matrix products.
        bytes: read from memory and written to it, each number once.
        products: dtypes in which its products could be made without rounding the operands.
    """

    flops: int
    bytes: int
    products: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """A call of which nothing but its rate is of interest: what it does, bytes or operations, and its best rate."""

    name: str
    call: Call
    amount: int
    rate: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The device's best rates: bytes of memory a second, and operations a second of square products of each dtype."""

    read: Probe
    products: Mapping[torch.dtype, Probe]

    def floor(self, work: Work) -> tuple[Probe, float]:
        """Return what sets the shortest time that some work could take, and the share of this probe's own time."""
        product = max((self.products[dtype] for dtype in work.products), key=lambda probe: probe.rate)
        bounds = [(self.read, work.bytes), (product, work.flops)]
        probe, amount = max(bounds, key=lambda bound: bound[1] / bound[0].rate)
        return probe, amount / probe.amount

    def as_dict(self) -> dict[str, Any]:
        """Return the rates for JSON."""
        return {
            "read_bytes_per_second": self.read.rate,
            "read_by": self.read.name,
            "product_flops_per_second": {name_of(dtype): probe.rate for dtype, probe in self.products.items()},
        }

    def __str__(self) -> str:
        products = ", ".join(f"{probe.rate / 1e9:.0f} in {name_of(dtype)}" for dtype, probe in self.products.items())
        return f"{self.read.rate / 1e9:.1f} GB/s read; products of {products} GFLOP/s"


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module's."""
    return str(dtype).removeprefix("torch.")


def last_cache() -> int:
    """Return the bytes of the machine's last cache; 32 MiB where the system does not tell."""
    try:
        sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
        return max(int(size[:-1]) * _UNITS[size[-1]] for size in sizes)
    except (OSError, ValueError, KeyError, IndexError):
        return _USUAL_CACHE


def measure_ceilings(device: torch.device, *, quick: bool) -> Ceilings:
    """Find the device's best rates, each by the fastest of several ways."""
    on_gpu = device.type != "cpu"
    size = 2**30 if on_gpu else max(8 * last_cache(), 2**28)
    numbers = torch.ones(size // (4 if quick else 1) // 4, device=device)
    matrix, ones = numbers[: len(numbers) // 4096 * 4096].view(-1, 4096), torch.ones(4096, device=device)
    ways: dict[str, Call] = {
        "torch.sum": numbers.sum,
        "torch.mv": lambda: torch.mv(matrix, ones),
        "torch.dot": lambda: torch.dot(numbers, numbers),
    }
    if on_gpu:
        half = len(numbers) // 2  # as many bytes are read and written as the others read
        ways["copy"] = lambda: numbers[:half].copy_(numbers[half : 2 * half])
    side = (8192 if on_gpu else 2048) // (4 if quick else 1)
    return Ceilings(
        _fastest(f"reading {numbers.nbytes >> 20} MiB by", ways, numbers.nbytes, device),
        {dtype: _product(dtype, side, device) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    )


def _product(dtype: torch.dtype, size: int, device: torch.device) -> Probe:
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    ways: dict[str, Call] = {"F.linear": lambda: F.linear(a, b)}
    if dtype is not torch.float16 or device.type != "cpu":
        # In float16 on a CPU this one runs at 1 GFLOP/s, and would take ten seconds.
        ways["torch.mm"] = lambda: torch.mm(a, b)
    return _fastest(f"{size} x {size} products in {name_of(dtype)} by", ways, 2 * size**3, device)


def _fastest(what: str, ways: dict[str, Call], amount: int, device: torch.device) -> Probe:
    best = {name: min(seconds(call, device) for _ in range(6)) for name, call in ways.items()}
    name = min(best, key=best.__getitem__)
    return Probe(f"{what} {name}", ways[name], amount, amount / best[name])


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Call, device: torch.device) -> float:
    """Return how long one call takes until its result is there."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def alive(device: torch.device) -> bool:
    """Return whether the device still answers: after an access to memory that is not there it never does again."""
    try:
        wait(device)
        return bool(torch.ones(2, device=device).sum() == 2)
    except RuntimeError:
        return False


def captured(calls: Sequence[Call]) -> list[Call]:
    """Make CUDA graphs of calls; each replay gives what the call gave, computed anew.

    Raises:
        RuntimeError: a call can't be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls[:3], *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    replays: list[Call] = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        replays.append(partial(_replayed, graph, result))
    return replays


def _replayed(graph: torch.cuda.CUDAGraph, result: Any) -> Any:
    graph.replay()
    return result


class _Interpreted(Backend):
    """The nvidia backend's kernels, offered to the CPU, where Triton interprets them."""

    name = "nvidia_interpreted"
    device_types = ("cpu",)

    def capabilities(self, device: torch.device) -> frozenset[str]:
        """Return whatever a kernel asks for."""
        return frozenset().union(*(kernel.requires for kernel in self.kernels()))

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the nvidia backend's."""
        from kpt_backend_nvidia import BACKEND

        return BACKEND.kernels()


@contextmanager
def interpreted() -> Iterator[None]:
    """Have dispatch choose the nvidia backend's kernels on a CPU, by Triton's interpreter."""
    from kpt_conformance.interpreter import prepare_once

    prepare_once()
    add_backend(_Interpreted())
    try:
        yield
    finally:
        remove_backend(_Interpreted.name)
