"""Masks as values: which keys a query may see. They compose by `&`, `|` and `~`, and lower to a `Plan`.

A query's *position* is its place among the keys. With as many queries as keys it is its index; where a cache holds
earlier keys, the first query stands at `offset`, which is the number of keys minus that of queries unless given.
"""

# Methods of masks do what `Mask` says.

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError

from .arguments import integer
from .intervals import complement, intersect, readable, unite
from .plan import BLOCK, Growing, Plan, all_blocks

#: More intervals for a query than so many, and the mask is kept as bits of blocks.
MOST_INTERVALS = 16


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes that a mask is lowered for.

    Attributes:
        batch: sequences.
        heads: of the queries.
        queries: of each sequence.
        keys: likewise.
        offset: position of the first query.
        device: where the plan is made.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    offset: int
    device: torch.device

    def positions(self) -> Tensor:
        """Return the positions of the queries, `[1, 1, Q]` int64."""
        first = torch.arange(self.queries, device=self.device) + self.offset
        return first[None, None]


class Mask(ABC):
    """Say which keys a query may see. Its values compose: `causal() & document(ids) | global_tokens(4)`."""

    @abstractmethod
    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return whether queries may see keys, in the shape that the arguments broadcast to.

        Args:
            extent: the sizes.
            b: sequences, int64 as all of these.
            h: heads.
            q: positions of queries.
            k: keys.
        """

    def intervals(self, extent: Extent) -> Tensor | None:
        """Return the keys of each query as tidy intervals `[B or 1, H or 1, Q, n, 2]`; None where there are no such."""
        return None

    def spread(self) -> tuple[bool, bool]:
        """Return whether sequences, and whether heads, differ."""
        return False, False

    def plain(self) -> str | None:
        """Return `all` or `causal` where that is all that the mask says."""
        return None

    def check(self, extent: Extent) -> None:  # noqa: B027  most fit any
        """Raise `InputError` unless the mask fits the sizes."""

    def __and__(self, other: "Mask") -> "Mask":
        return _Both((*_parts(self, _Both), *_parts(_mask(other), _Both)))

    def __or__(self, other: "Mask") -> "Mask":
        return _Either((*_parts(self, _Either), *_parts(_mask(other), _Either)))

    def __invert__(self) -> "Mask":
        return self.mask if isinstance(self, _Not) else _Not(self)

    def plan(
        self,
        queries: int,
        keys: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        offset: int | None = None,
        device: torch.device | str = "cpu",
        growing: bool = False,
    ) -> Plan:
        """Lower the mask: to causality alone, to intervals of keys, or to the bits of blocks that are partly live.

        Args:
            queries: of each sequence.
            keys: likewise; as many as queries if None.
            batch: sequences.
            heads: of the queries.
            offset: position of the first query; `keys - queries` if None.
            device: where the plan is made.
            growing: whether the plan may serve calls of other lengths, as steps of decoding are: it is lowered anew for
                them, its last query at the last key. Otherwise they are refused.

        Raises:
            InputError: the mask is for other sizes, or `growing` comes with an `offset`.
        """
        queries = integer("plan", "queries", queries, 0)
        keys = queries if keys is None else integer("plan", "keys", keys, 0)
        batch, heads = integer("plan", "batch", batch, 0), integer("plan", "heads", heads, 0)
        if growing:
            if offset is not None:
                raise InputError(
                    f"plan: the last query of a growing plan stands at the last key; got offset={offset}: leave it out"
                )
            made = self.plan(queries, keys, batch=batch, heads=heads, device=device)
            return replace(made, growing=Growing(partial(self.plan, batch=batch, heads=heads), device))
        offset = keys - queries if offset is None else integer("plan", "offset", offset)
        extent = Extent(batch, heads, queries, keys, offset, torch.device(device))
        self.check(extent)
        by_batch, by_head = self.spread()
        sizes: dict[str, Any] = {
            "position": offset, "queries": queries, "keys": keys,
            "batch": batch if by_batch else None, "heads": heads if by_head else None,
        }  # fmt: skip
        if (whole := self.plain()) is not None:
            return Plan(causal=whole == "causal", **sizes)
        rows = self.intervals(extent)
        if rows is not None and rows.shape[-2] <= MOST_INTERVALS:
            return Plan(intervals=rows.int(), **sizes)
        if not readable(torch.empty(0, device=extent.device)):
            return Plan(**all_blocks(_evaluate(self, extent).contiguous()), **sizes)
        return Plan(**_blocks(self, extent), **sizes)

    def dense(self, queries: int, keys: int | None = None, **sizes: Any) -> Tensor:
        """Return the mask as `[B or 1, H or 1, Q, K]` bool, True where a query may see a key, for tests and pictures.

        Takes what `plan` takes.
        """
        queries = integer("dense", "queries", queries, 0)
        keys = queries if keys is None else integer("dense", "keys", keys, 0)
        offset = sizes.get("offset")
        extent = Extent(
            sizes.get("batch", 1),
            sizes.get("heads", 1),
            queries,
            keys,
            keys - queries if offset is None else offset,
            torch.device(sizes.get("device", "cpu")),
        )
        self.check(extent)
        return _evaluate(self, extent)

    def picture(self, queries: int, keys: int | None = None, *, offset: int | None = None, width: int = 64) -> str:
        """Return the mask of the first sequence and head as text: a filled cell where some query of it sees a key."""
        keys = queries if keys is None else keys
        seen = self.dense(queries, keys, offset=offset)[0, 0]
        step = max(1, -(-max(queries, keys) // width))
        lines = []
        for row in seen.split(step):
            cells = [part.float().mean().item() for part in row.split(step, dim=1)]
            lines.append("".join("█" if cell == 1 else "▒" if cell else "·" for cell in cells))
        return "\n".join(lines)

    def plot(self, queries: int, keys: int | None = None, *, offset: int | None = None) -> Any:
        """Draw the mask of the first sequence and head; return matplotlib's axes (needs `matplotlib`)."""
        from matplotlib import pyplot

        _, axes = pyplot.subplots()
        axes.imshow(
            self.dense(queries, keys, offset=offset)[0, 0], cmap="Blues", vmin=0, vmax=1, interpolation="nearest"
        )
        axes.set(xlabel="key", ylabel="query")
        return axes


def _mask(other: object) -> Mask:
    if not isinstance(other, Mask):
        raise InputError(
            f"a mask composes with a mask; got {type(other).__name__}: predicate(f) or dense_mask(t) makes one"
        )
    return other


def _parts(mask: Mask, kind: "type[_Both] | type[_Either]") -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, kind) else (mask,)


def _evaluate(mask: Mask, extent: Extent, queries: range | None = None, keys: range | None = None) -> Tensor:
    """Return a part of the mask, or all of it, `[B or 1, H or 1, queries, keys]` bool."""
    by_batch, by_head = mask.spread()
    device = extent.device
    b = torch.arange(extent.batch if by_batch else 1, device=device)[:, None, None, None]
    h = torch.arange(extent.heads if by_head else 1, device=device)[:, None, None]
    # Sizes of a graph are no numbers, which ranges are made of.
    of_queries, of_keys = ((0, size) if part is None else (part.start, part.stop)
                           for part, size in ((queries, extent.queries), (keys, extent.keys)))  # fmt: skip
    q = torch.arange(*of_queries, device=device)[:, None] + extent.offset
    k = torch.arange(*of_keys, device=device)
    found = mask.allows(extent, b, h, q, k)
    told = getattr(found, "dtype", type(found).__name__)
    if told is not torch.bool:
        raise InputError(f"a predicate must give a bool tensor; got {told}")
    # What does not look at sequences or heads says so by its shape, and is not repeated for them.
    shape = (*(1,) * (4 - found.dim()), *found.shape)
    most = (b.shape[0], h.shape[0], q.shape[0], k.shape[0])
    if not all(have in (1, want) for have, want in zip(shape, most, strict=False)) or found.dim() > 4:
        raise InputError(f"a predicate must give what broadcasts to {list(most)}; got {list(found.shape)}")
    return found.expand(*shape[:2], *most[2:])


def _blocks(mask: Mask, extent: Extent) -> dict[str, Any]:
    """Evaluate a mask a row of blocks at a time, where the part that has intervals leaves something."""
    tables, kept, count = [], [], 0
    known = [part.intervals(extent) for part in _parts(mask, _Both)]
    hull = reduce(
        intersect,
        [each for each in known if each is not None],
        torch.tensor([[[[[0, extent.keys]]]]]).to(extent.device),
    )
    columns = -(-extent.keys // BLOCK)
    for start in range(0, extent.queries, BLOCK):
        rows = range(start, min(start + BLOCK, extent.queries))
        part = hull[:, :, start : rows.stop] if hull.shape[2] > 1 else hull
        filled = part[..., 1] > part[..., 0]
        if not filled.any():
            tables.append(torch.zeros((1, 1, columns), dtype=torch.int64, device=extent.device))
            continue
        first = int(part[..., 0][filled].min()) // BLOCK
        last = -(-int(part[..., 1][filled].max()) // BLOCK)
        cells = _evaluate(mask, extent, rows, range(first * BLOCK, min(last * BLOCK, extent.keys)))
        high, wide = BLOCK - cells.shape[2], (last - first) * BLOCK - cells.shape[3]
        pad = torch.nn.functional.pad
        bits = pad(cells, (0, wide, 0, high)).unflatten(3, (last - first, BLOCK)).transpose(2, 3)
        live = bits.flatten(3).any(-1)
        full = pad(cells, (0, wide, 0, high), value=True).unflatten(3, (last - first, BLOCK)).transpose(2, 3)
        whole = full.flatten(3).all(-1) & live
        table = torch.zeros((*cells.shape[:2], columns), dtype=torch.int64, device=extent.device)
        partial = live & ~whole
        values = whole.long()
        number = int(partial.sum())
        values[partial] = torch.arange(2 + count, 2 + count + number, device=extent.device)
        count += number
        table[..., first:last] = values
        tables.append(table)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=extent.device)
        kept.append((bits[partial].unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8))
    shape = (extent.batch if mask.spread()[0] else 1, extent.heads if mask.spread()[1] else 1)
    blocks = torch.zeros((*shape, len(tables), columns), dtype=torch.int64, device=extent.device)
    for row, table in enumerate(tables):
        blocks[:, :, row] = table
    block_bits = torch.cat([each for each in kept if each.shape[0]] or [
        torch.zeros((1, BLOCK, BLOCK // 8), dtype=torch.uint8, device=extent.device)  # some read one anyway
    ])  # fmt: skip
    if count:  # patterns repeat: blocks that are alike share their bits
        block_bits, which = block_bits.flatten(1).unique(dim=0, return_inverse=True)
        block_bits = block_bits.unflatten(1, (BLOCK, BLOCK // 8))
        blocks = torch.where(blocks >= 2, which[(blocks - 2).clamp(min=0)] + 2, blocks)
    for dim in (0, 1):  # sequences, then heads, that turn out to be alike are kept once
        one = blocks.narrow(dim, 0, min(blocks.shape[dim], 1))
        blocks = one if bool((blocks == one).all()) else blocks
    return {"blocks": blocks.int(), "block_bits": block_bits}


@dataclass(frozen=True, slots=True)
class _Many(Mask):
    masks: tuple[Mask, ...]

    def spread(self) -> tuple[bool, bool]:
        each = [mask.spread() for mask in self.masks]
        return any(batch for batch, _ in each), any(head for _, head in each)

    def check(self, extent: Extent) -> None:
        for mask in self.masks:
            mask.check(extent)


class _Both(_Many):
    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return reduce(torch.logical_and, [mask.allows(extent, b, h, q, k) for mask in self.masks])

    def intervals(self, extent: Extent) -> Tensor | None:
        return _combined(self.masks, extent, intersect)


class _Either(_Many):
    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return reduce(torch.logical_or, [mask.allows(extent, b, h, q, k) for mask in self.masks])

    def intervals(self, extent: Extent) -> Tensor | None:
        return _combined(self.masks, extent, unite)


def _combined(masks: tuple[Mask, ...], extent: Extent, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    found: Tensor | None = None
    for mask in masks:
        rows = mask.intervals(extent)
        if rows is None:
            return None
        found = rows if found is None else how(found, rows)
        if found.shape[-2] > 4 * MOST_INTERVALS:
            return None
    return found


@dataclass(frozen=True, slots=True)
class _Not(Mask):
    mask: Mask

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~self.mask.allows(extent, b, h, q, k)

    def intervals(self, extent: Extent) -> Tensor | None:
        rows = self.mask.intervals(extent)
        return None if rows is None else complement(rows, extent.keys)

    def spread(self) -> tuple[bool, bool]:
        return self.mask.spread()

    def check(self, extent: Extent) -> None:
        self.mask.check(extent)
