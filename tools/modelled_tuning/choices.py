"""Which tiles the model prefers to the defaults, for the sizes of real models."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kpt_core.registry import case_tables
from kpt_triton.moe.experts import is_few
from kpt_triton.moe.roofline import Processor, Product, predicted_seconds
from kpt_triton.moe.tiles import candidate_tiles, default_tile
from kpt_triton.tile import Tile

from .devices import variants
from .readings import Readings

Key = tuple[int | str, ...]

#: How many times faster a tile must be than the default over all sizes of a key, whatever the estimates are.
CLEAR = 1.05
#: Tokens (rows of plain products: top-8 times as many), powers of two as the size keys have them.
_TOKENS = tuple(2**power for power in range(1, 16))
_ROWS = tuple(2**power for power in range(6, 18))

#: Op, kind of product, and how its keys end: with which of K and N is contiguous.
_PLAIN_PRODUCTS: tuple[tuple[str, str, tuple[Key, ...]], ...] = (
    ("moe.grouped_mm", "plain", (("NK",), ("KN",))),
    ("moe.grouped_mm_wgrad", "wgrad", ((),)),
)
#: No size that a key stands for may lose more than that, whatever the estimates are.
_NO_LOSS = 0.98

#: Seconds on each variant of a device, at each size.
_Times = list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is written for the calls of an op that share a key.

    Attributes:
        op: name of the op.
        key: of the calls.
        config: of the op's kernel: the tiles that are not its defaults, by name.
        seconds: predicted, at the key's size.
        gain: how many times faster than the defaults, at least: the least of all variants of the device.
        case: the real model that has such sizes.
    """

    op: str
    key: Key
    config: dict[str, str]
    seconds: float
    gain: float
    case: str


@dataclass(frozen=True, slots=True)
class _Calls:
    """Products that share a tile (its name in the configuration), at the sizes that a key stands for."""

    tile: str
    sizes: tuple[tuple[Product, ...], ...]


def choices(device: str, readings: Readings) -> list[Choice]:
    """What a device's table holds, in order."""
    there = variants(device)
    return [
        chosen
        for op, key, case, calls in _questions()
        if (chosen := _choose(op, key, case, calls, there, readings)) is not None
    ]


def _choose(
    op: str, key: Key, case: str, calls: list[_Calls], there: list[Processor], readings: Readings
) -> Choice | None:
    """The best tile of each product, if together they are clearly faster than the defaults."""
    config: dict[str, str] = {}
    before = after = [[0.0] * len(calls[0].sizes) for _ in there]
    for group in calls:
        kind, chip = group.sizes[0][0].kind, there[0].chip

        def times(tile: Tile | None, group: _Calls = group) -> _Times:
            return [[_seconds(products, tile, where, readings) for products in group.sizes] for where in there]

        usual = times(None)
        offered = [tile for tile in candidate_tiles(kind, chip) if tile in readings[kind, chip]]
        tried = [
            (_gain(usual, taken), taken, str(tile)) for tile, taken in zip(offered, map(times, offered), strict=True)
        ]
        # Of those that are alike for the model, the first by name.
        gain, taken, written = max(tried, key=lambda trial: round(trial[0], 6))
        if gain >= CLEAR:
            config[group.tile] = written
        before, after = _added(before, usual), _added(after, taken if gain >= CLEAR else usual)
    gain = _gain(before, after)
    if gain < CLEAR:
        return None
    # The middle variant is the device as it is estimated, the last size the key's own.
    return Choice(op=op, key=key, config=config, seconds=after[len(there) // 2][-1], gain=gain, case=case)


def _added(one: _Times, other: _Times) -> _Times:
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]


def _gain(before: _Times, after: _Times) -> float:
    """How many times faster over all sizes, on the variant where that is least; 0 if some size loses."""
    if any(a * _NO_LOSS > b for x, y in zip(after, before, strict=True) for a, b in zip(x, y, strict=True)):
        return 0.0
    return min(sum(x) / sum(y) for x, y in zip(before, after, strict=True))


def _seconds(products: Iterable[Product], tile: Tile | None, where: Processor, readings: Readings) -> float:
    total = 0.0
    for product in products:
        chosen = tile or default_tile(product.kind, where.chip, 2, product.rows, product.experts)
        total += predicted_seconds(product, chosen, readings[product.kind, where.chip][chosen], where)
    return total


def _within(size: int) -> list[int]:
    """Sizes that a power of two stands for: the least, one between, and itself."""
    return sorted({size // 2 + 1, math.ceil(size * 0.75), size})


def _questions() -> Iterator[tuple[str, Key, str, list[_Calls]]]:
    """Op, key, case and products, for the real models of the ops' case tables and as many tokens as may be."""
    tables = case_tables()
    for case in tables["moe.experts"].cases:
        if not case.model or "scheme" in case.sizes:
            continue
        hidden, inner, experts, top_k = (case.sizes[name] for name in ("hidden", "inner", "num_experts", "top_k"))
        for tokens in _TOKENS:
            key = (tokens, top_k, experts, hidden, 2 * inner, "plain")
            sizes = [size for size in _within(tokens) if size > 0]
            if not any(is_few(size, top_k, experts) for size in sizes):
                yield "moe.experts", key, case.name, _experts(sizes, hidden, inner, experts, top_k, training=False)
            yield "moe.experts", (*key, "gradient"), case.name, _experts(sizes, hidden, inner, experts, top_k, True)
    for op, kind, layouts in _PLAIN_PRODUCTS:
        for case in tables[op].cases:
            if not case.model:
                continue
            inner, columns, experts = (case.sizes[name] for name in ("inner", "columns", "groups"))
            for rows in _ROWS:
                products = tuple(
                    (Product(kind=kind, rows=size, experts=experts, inner=inner, columns=columns),)
                    for size in _within(rows)
                )
                for layout in layouts:
                    yield op, (rows, inner, columns, experts, *layout), case.name, [_Calls("tile", products)]


def _experts(sizes: list[int], hidden: int, inner: int, experts: int, top_k: int, training: bool) -> list[_Calls]:
    """The products of a layer's experts, as `kpt_triton.moe.experts` launches them."""

    def at(kind: str, k: int, n: int, share: int = 1) -> list[Product]:
        return [
            Product(kind=kind, rows=size * top_k, experts=experts, inner=k, columns=n, top_k=share) for size in sizes
        ]

    def calls(tile: str, *products: list[Product]) -> _Calls:
        return _Calls(tile, tuple(zip(*products, strict=True)))

    up, down = at("pair", hidden, inner, top_k), at("plain", inner, hidden)
    if not training:
        return [calls("up", up), calls("down", down)]
    return [
        calls("up", up),
        calls("down", down, at("plain", 2 * inner, hidden)),
        calls("slope", at("slope", hidden, inner, top_k)),
        calls("wgrad", at("wgrad", hidden, 2 * inner, top_k), at("wgrad", hidden, inner, top_k)),
    ]
