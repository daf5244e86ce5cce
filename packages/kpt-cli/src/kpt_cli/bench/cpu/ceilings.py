"""What the machine can do at best, measured: reading memory, and multiplying large matrices."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """A call of which nothing but its rate is of interest.

    Attributes:
        name: what it does.
        call: does it.
        amount: bytes read, or operations.
        rate: the best that was seen, a second.
    """

    name: str
    call: Callable[[], object]
    amount: int
    rate: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The shortest time that a call could take, and what sets it.

    Attributes:
        bound_by: the probe that sets it.
        share: of the time that this probe's call takes.
        seconds: at the probe's best rate.
    """

    bound_by: Probe
    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's best rates.

    Attributes:
        read: bytes a second, of memory, by as many threads as torch uses.
        products: operations a second, of square matrices of each dtype.
    """

    read: Probe
    products: Mapping[torch.dtype, Probe]

    def floor(self, work: Work) -> Floor:
        """The floor of some work: the longer of reading it and multiplying it."""
        product = max((self.products[dtype] for dtype in work.products), key=lambda probe: probe.rate)
        bounds = [(self.read, work.bytes), (product, work.flops)]
        probe, amount = max(bounds, key=lambda bound: bound[1] / bound[0].rate)
        return Floor(probe, amount / probe.amount, amount / probe.rate)

    def summary(self) -> str:
        """The rates in words."""
        products = ", ".join(
            f"{probe.rate / 1e9:.0f} in {str(dtype).removeprefix('torch.')}" for dtype, probe in self.products.items()
        )
        return f"{self.read.rate / 1e9:.1f} GB/s read; products of {products} GFLOP/s"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "read_bytes_per_second": self.read.rate,
            "read_by": self.read.name,
            "read_bytes": self.read.amount,
            "product_flops_per_second": {str(d).removeprefix("torch."): p.rate for d, p in self.products.items()},
            "product_flops": {str(d).removeprefix("torch."): p.amount for d, p in self.products.items()},
        }


def measure_ceilings(*, quick: bool) -> Ceilings:
    """Find the machine's best rates, each by the fastest of several ways."""
    elements = max(8 * last_cache(), 2**28) // (4 if quick else 1) // 4
    return Ceilings(
        read=_read(torch.ones(elements)),
        products={
            dtype: _product(dtype, 512 if quick else 2048) for dtype in (torch.float32, torch.bfloat16, torch.float16)
        },
    )


def last_cache() -> int:
    """Bytes of the machine's last cache; 32 MiB where the system does not tell."""
    try:
        sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
        return max(int(size[:-1]) * _UNITS[size[-1]] for size in sizes)
    except (OSError, ValueError, KeyError, IndexError):
        return _USUAL_CACHE


def _read(numbers: Tensor) -> Probe:
    matrix = numbers[: len(numbers) // 4096 * 4096].view(-1, 4096)
    ones = torch.ones(4096)
    ways: dict[str, Callable[[], object]] = {
        "torch.sum": numbers.sum,
        "torch.mv": lambda: torch.mv(matrix, ones),
        "torch.dot": lambda: torch.dot(numbers, numbers),
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(numbers),
    }
    return _fastest(f"reading {numbers.nbytes >> 20} MiB by", ways, numbers.nbytes)


def _product(dtype: torch.dtype, size: int) -> Probe:
    a, b = (torch.rand(size, size).to(dtype) for _ in range(2))
    ways: dict[str, Callable[[], object]] = {"F.linear": lambda: F.linear(a, b)}
    if dtype is not torch.float16:
        # In float16 on a CPU this one runs at 1 GFLOP/s, and would take ten seconds.
        ways["torch.mm"] = lambda: torch.mm(a, b)
    return _fastest(f"{size} x {size} products in {str(dtype).removeprefix('torch.')} by", ways, 2 * size**3)


def _fastest(what: str, ways: dict[str, Callable[[], object]], amount: int) -> Probe:
    best = {}
    for name, call in ways.items():
        call()
        best[name] = min(_seconds(call) for _ in range(5))
    name = min(best, key=best.__getitem__)
    return Probe(f"{what} {name}", ways[name], amount, amount / best[name])


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
