"""An op whose kernels take as long as they say, on the clock of the tests, and a backend that offers them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from clock import CLOCK
from kpt_core import Case, CaseTable, Kernel, _registry, op
from loopback import Loopback

MODULE = "tuning_kernels"
Key = tuple[int | str, ...]


def _size_key(x: Tensor, weight: Tensor) -> Key:
    return kpt_core.next_power_of_two(x.shape[0]), weight.shape[1]


@op("tuning.product", size_key=_size_key)
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply matrices; takes 8 ms."""
    _take(8e-3)
    return x @ weight


@op("tuning.negated")
def negated(x: Tensor) -> Tensor:
    """Negate; has no size key; takes 8 ms."""
    _take(8e-3)
    return -x


@op("tuning.composed", composed_of=("tuning.product",))
def composed(x: Tensor, weight: Tensor) -> Tensor:
    """Calls the product."""
    return product(x, weight) + 1


def _take(seconds: float) -> None:
    if not torch.compiler.is_compiling():
        CLOCK.sleep(seconds)


def slow(x: Tensor, weight: Tensor) -> Tensor:
    """Comes first by its priority."""
    _take(4e-3)
    return x @ weight


def quick(x: Tensor, weight: Tensor) -> Tensor:
    """Comes last by its priority."""
    _take(1e-3)
    return x @ weight


#: What each of the next calls of `moody` takes.
MOODS: list[float] = []


def moody(x: Tensor, weight: Tensor) -> Tensor:
    _take(MOODS.pop(0))
    return x @ weight


def quick_for_few(x: Tensor, weight: Tensor) -> Tensor:
    _take(1e-3 if x.shape[0] <= 8 else 6e-3)
    return x @ weight


def wrong(x: Tensor, weight: Tensor) -> Tensor:
    """Fast, and forgets the last row."""
    result = x @ weight
    result[-1] = 0
    return result


def raising(x: Tensor, weight: Tensor) -> Tensor:
    raise RuntimeError("no such instruction\nsecond line")


def wrong_gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Right forward; its gradient of x is twice what it should be."""
    _take(2e-3)
    return x @ weight + (x - x.detach()) @ weight


@dataclass(frozen=True)
class Tile:
    rows: int


#: What `tiled` was called with, in turn.
SEEN: list[Any] = []


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """As slow as `slow`, unless its tile has 32 rows."""
    config = kpt_core.tuned_config("tuning.product", f"{MODULE}:tiled", x, weight)
    tile = Tile(**config) if config is not None else Tile(16)
    SEEN.append(tile.rows)
    if tile.rows == 99:
        raise ValueError("99 rows do not fit")
    _take(1e-3 if tile.rows == 32 else 4e-3)
    return x @ weight + (tile.rows == 66)


def tiles(x: Tensor, weight: Tensor) -> list[Tile]:
    return [Tile(rows) for rows in (8, 32, 66, 99)]


SAME = [{"rows": 16}]


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """A kernel of the composed op, slower than the quick product plus one."""
    _take(2e-3)
    return x @ weight + 1


def negated_slow(x: Tensor) -> Tensor:
    _take(4e-3)
    return -x


def negated_quick(x: Tensor) -> Tensor:
    _take(1e-3)
    return 0 - x


def refuses_many(x: Tensor, weight: Tensor) -> str | None:
    return f"{x.shape[0]} rows; takes at most 8" if x.shape[0] > 8 else None


def offer(attribute: str, op: str = "tuning.product", **needs: Any) -> Kernel:
    """A kernel of this module by its attribute."""
    for name in ("unsupported", "configs"):
        if name in needs:
            needs[name] = f"{MODULE}:{needs[name]}"
    return Kernel(op, f"{MODULE}:{attribute}", **needs)


def two(**needs: Any) -> Loopback:
    """The kernel that comes first and the faster one."""
    return Loopback(offer("slow", priority=9), offer("quick", **needs))


def build(generator: torch.Generator, rows: int = 4, columns: int = 3) -> dict[str, Tensor]:
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "weight": torch.randn(5, columns, generator=generator, dtype=torch.float64)}


CASES = (
    Case(name="few", sizes={"rows": 4}, model=True),
    Case(name="many", sizes={"rows": 100}, model=True),
    Case(name="odd", sizes={"rows": 3, "columns": 7}),
    Case(name="huge", sizes={"rows": 10**9}, model=True, large=True),
)
FLOAT32 = (torch.float32,)
TABLES = {
    "tuning.product": CaseTable(
        op="tuning.product", build=build, cases=CASES, gradients=("x", "weight"), dtypes=FLOAT32
    ),
    "tuning.composed": CaseTable(op="tuning.composed", build=build, cases=CASES[:1], dtypes=FLOAT32),
    "tuning.negated": CaseTable(
        op="tuning.negated",
        build=lambda generator, **sizes: {"x": build(generator, **sizes)["x"]},
        cases=CASES[:2],
        dtypes=FLOAT32,
    ),
}


def use_cases(patch: pytest.MonkeyPatch) -> None:
    """Let the case tables of this module be those of installed packages."""
    patch.setattr(_registry._state, "cases", dict(TABLES))
