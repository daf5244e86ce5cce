"""An op whose kernels take as long as they say, on the clock of the tests, and a backend that offers them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from clock import CLOCK
from kpt_core import Call, Kernel, Op, Refusal, explain, op
from kpt_core.policy import next_power_of_two
from kpt_optimize import cases
from kpt_optimize import tune as run_tune
from kpt_optimize.cases import Case, CaseTable
from kpt_optimize.tuning.run import Tuning
from loopback import Loopback

MODULE = "tuning_kernels"
Key = tuple[int | str, ...]


def size_key(call: Call) -> Key:
    return next_power_of_two(call.x.shape[0]), call.weight.shape[1]


@op("tuning.product", size_key=size_key)
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply matrices; takes 8 ms."""
    _take(8e-3)
    return x @ weight


@op("tuning.negated")
def negated(x: Tensor) -> Tensor:
    """Negate; has no size key; takes 8 ms."""
    _take(8e-3)
    return -x


@op("tuning.composed")
def composed(x: Tensor, weight: Tensor) -> Tensor:
    """Its kernel `parts` calls the product."""
    _take(9e-3)
    return x @ weight + 1


def _take(seconds: float) -> None:
    if not torch.compiler.is_compiling():
        CLOCK.sleep(seconds)


def _taking(seconds: float) -> Callable[[Call], Tensor]:
    def run(call: Call) -> Tensor:
        _take(seconds)
        return call.x @ call.weight

    return run


#: The first comes first by its priority, the second last.
slow, quick = _taking(4e-3), _taking(1e-3)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    found = {"x": grad @ call.weight.T, "weight": call.x.T @ grad}
    return {name: found[name] for name in call.needs}


def doubled_backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    return backward(call, saved, 2 * grad)


#: What each of the next calls of `moody` takes.
MOODS: list[float] = []


def moody(call: Call) -> Tensor:
    _take(MOODS.pop(0))
    return call.x @ call.weight


def quick_for_few(call: Call) -> Tensor:
    _take(1e-3 if call.x.shape[0] <= 8 else 6e-3)
    return call.x @ call.weight


def wrong(call: Call) -> Tensor:
    """Fast, and forgets the last row."""
    result: Tensor = call.x @ call.weight
    result[-1] = 0
    return result


def raising(call: Call) -> Tensor:
    raise RuntimeError("no such instruction\nsecond line")


@dataclass(frozen=True)
class Tile:
    rows: int


#: The rows of the tile that `tiled` was called with, in turn.
SEEN: list[int] = []


def tiled(call: Call) -> Tensor:
    """As slow as `slow`, unless its tile has 32 rows."""
    tile = Tile(**call.config) if call.config is not None else Tile(16)
    SEEN.append(tile.rows)
    if tile.rows == 99:
        raise ValueError("99 rows do not fit")
    _take(1e-3 if tile.rows == 32 else 4e-3)
    return call.x @ call.weight + (tile.rows == 66)


def tiles(call: Call) -> list[Tile]:
    return [Tile(rows) for rows in (8, 32, 66, 99)]


SAME: Any = [{"rows": 16}]


def whole(call: Call) -> Tensor:
    """A kernel of the composed op, slower than the quick product plus one."""
    _take(2e-3)
    return call.x @ call.weight + 1


def parts(call: Call) -> Tensor:
    """A kernel of the composed op that calls the product."""
    return product(call.x, call.weight) + 1


def negated_slow(call: Call) -> Tensor:
    _take(4e-3)
    return -call.x


def negated_quick(call: Call) -> Tensor:
    _take(1e-3)
    return 0 - call.x


def refuses_many(call: Call) -> Refusal | None:
    rows = call.x.shape[0]
    return Refusal("{rows} rows; takes at most 8", rows=rows) if rows > 8 else None


def offer(attribute: str, op: str = "tuning.product", **settings: Any) -> Kernel:
    """A kernel of this module by its attribute."""
    for name in ("backward", "unsupported", "configs"):
        if name in settings:
            settings[name] = f"{MODULE}:{settings[name]}"
    return Kernel(op, f"{MODULE}:{attribute}", **settings)


def named(attribute: str, op: str = "tuning.product", backend: str = "loop") -> str:
    """A kernel's identity, which tables and locks go by."""
    return f"{backend}/{op}/{MODULE}:{attribute}"


def two(**needs: Any) -> Loopback:
    """The kernel that comes first and the faster one."""
    return Loopback(offer("slow", priority=9), offer("quick", **needs))


FEW, MANY, WEIGHT = (torch.randn(shape) for shape in ((4, 5), (100, 5), (5, 3)))


def kernel(op: Op[..., Tensor], *args: Tensor) -> str:
    """Which of this module's kernels would serve a call."""
    return explain(op, *args).kernel.rpartition(":")[2]


def tune(*names: str, **options: Any) -> Tuning:
    return run_tune(names or ("tuning.product",), **options)


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
    patch.setattr(cases, "_cases", lambda: dict(TABLES))
