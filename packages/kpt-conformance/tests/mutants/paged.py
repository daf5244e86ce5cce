"""Faults that kernels over paged caches have: in pages, lengths, positions, windows, heads, scales and slots."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .mutant import Mutant

MUTANTS: list[Mutant] = []


class Paged:
    """A right kernel of `attention.paged`, a query at a time, in splits of five keys."""

    split = 5

    def ends(self, call: Any) -> list[int]:
        return list(range(len(call.q) + 1)) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()

    def position(self, length: int, queries: int, query: int) -> int:
        return length - queries + query

    def past(self, call: Any, position: int, length: int) -> int:
        return position + 1 if call.causal else length

    def first(self, call: Any, position: int) -> int:
        return max(position + 1 - call.window, 0) if call.window else 0

    def table(self, call: Any, sequence: int) -> Tensor:
        return call.block_table[sequence].long()

    def places(self, call: Any, sequence: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        size = call.k_cache.shape[1]
        return self.table(call, sequence)[keys // size], keys % size

    def read(self, call: Any, cache: Tensor) -> Tensor:
        return cache.to(torch.float32) if cache.itemsize == 1 else cache

    def rows(self, call: Any, cache: Tensor, sequence: int, keys: Tensor) -> Tensor:
        page, place = self.places(call, sequence, keys)
        found = self.read(call, cache)[page, place].to(self.wide(call))
        return self.heads(call, found, 1)

    def heads(self, call: Any, of_keys: Tensor, dim: int) -> Tensor:
        return of_keys.repeat_interleave(call.q.shape[1] // call.k_cache.shape[2], dim)

    def wide(self, call: Any) -> torch.dtype:
        return torch.float64 if call.q.dtype is torch.float64 else torch.float32

    def k_scale(self, call: Any) -> Tensor | float:
        return 1.0 if call.k_scale is None else self.heads(call, call.k_scale.to(self.wide(call)), 0)[:, None]

    def v_scale(self, call: Any) -> Tensor | float:
        return 1.0 if call.v_scale is None else self.heads(call, call.v_scale.to(self.wide(call)), 0)[:, None]

    def scores(self, call: Any, q: Tensor, k: Tensor) -> Tensor:
        scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
        scores = torch.einsum("hd,khd->hk", q * scale, k) * self.k_scale(call)
        return call.softcap * (scores / call.softcap).tanh() if call.softcap else scores

    def distance(self, keys: Tensor, position: int, length: int) -> Tensor:
        return (keys - position).abs()

    def slopes(self, call: Any, sequence: int) -> Tensor:
        return call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[sequence]

    def bias(self, call: Any, row: int, keys: Tensor) -> Tensor:
        return call.bias[:, row if call.bias.shape[1] > 1 else 0][:, keys]

    def added(self, call: Any, sequence: int, row: int, position: int, keys: Tensor) -> Tensor | float:
        added: Tensor | float = 0.0
        if call.alibi_slopes is not None:
            distance = self.distance(keys, position, int(call.lengths[sequence]))
            added = added - self.slopes(call, sequence).to(self.wide(call))[:, None] * distance
        return added if call.bias is None else added + self.bias(call, row, keys).to(self.wide(call))

    def sink(self, call: Any, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = q.new_full((len(q), 1), -math.inf)
        if call.sinks is not None:
            largest = call.sinks.to(q.dtype)[:, None]
        return largest, (largest > -math.inf).to(q.dtype), q.new_zeros(len(q), call.v_cache.shape[3])

    def faded(self, largest: Tensor, higher: Tensor) -> Tensor:
        return (largest - higher).exp().nan_to_num(0)

    def keys(self, call: Any, row: int, position: int, length: int) -> Tensor:
        past = max(length if call.mask is not None else self.past(call, position, length), 0)
        keys = torch.arange(past)
        keys = keys[(keys >= self.first(call, position)) | (keys < self.sunk(call))]
        return keys if call.mask is None else keys[self.told(call, call.mask[row], keys, length)]

    def sunk(self, call: Any) -> int:
        return call.first

    def told(self, call: Any, mask: Tensor, keys: Tensor, length: int) -> Tensor:
        column = keys - (length - len(mask))
        return (column < 0) | mask[column.clamp(min=0)]

    def joined(
        self, call: Any, q: Tensor, sequence: int, keys: Tensor, row: int, position: int
    ) -> tuple[Tensor, Tensor]:
        largest, total, mean = self.sink(call, q)
        for some in keys.split(self.split) if len(keys) else ():
            k, v = (self.rows(call, cache, sequence, some) for cache in (call.k_cache, call.v_cache))
            scores = self.scores(call, q, k) + self.added(call, sequence, row, position, some)
            higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, fading = (scores - higher).exp(), self.faded(largest, higher)
            total = total * fading + weights.sum(-1, keepdim=True)
            mean = mean * fading + torch.einsum("hk,khd->hd", weights, v)
            largest = higher
        return self.result(mean, total), self.lse(call, largest, total)

    def result(self, mean: Tensor, total: Tensor) -> Tensor:
        return mean / total.masked_fill(total == 0, 1)

    def lse(self, call: Any, largest: Tensor, total: Tensor) -> Tensor:
        return (largest + total.log()).squeeze(-1)

    def forward(self, call: Any) -> Any:
        out = call.q.new_zeros((*call.q.shape[:2], call.v_cache.shape[3]))
        lse = call.q.new_zeros(call.q.shape[:2], dtype=self.wide(call))
        ends = self.ends(call)
        for sequence, length in enumerate(call.lengths.tolist()):
            queries = ends[sequence + 1] - ends[sequence]
            for query in range(queries):
                position, row = self.position(length, queries, query), ends[sequence] + query
                keys = self.keys(call, row, position, length)
                one, lse[row] = self.joined(call, call.q[row].to(lse.dtype), sequence, keys, row, position)
                out[row] = (one * self.v_scale(call)).to(out.dtype)
        return out, lse if call.return_lse else None


class Update:
    """A right kernel of `attention.update_cache`, a row at a time."""

    def slot(self, call: Any, slot: int) -> int | None:
        return slot if slot >= 0 else None

    def scale(self, call: Any, name: str) -> Tensor | None:
        return getattr(call, f"{name}_scale")

    def bounded(self, rows: Tensor, most: float) -> Tensor:
        return rows.clamp(-most, most)

    def stored(self, call: Any, name: str) -> Tensor:
        rows, dtype, scale = getattr(call, name), call.k_cache.dtype, self.scale(call, name)
        if scale is not None:
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) / scale[:, None]
        if dtype.itemsize == 1:
            rows = self.bounded(rows.float(), torch.finfo(dtype).max)
        return rows.to(dtype)

    def place(self, slot: int, size: int) -> tuple[int, int]:
        return slot // size, slot % size

    def forward(self, call: Any) -> None:
        for name, cache in (("k", call.k_cache), ("v", call.v_cache)):
            rows = self.stored(call, name)
            for row, given in enumerate(call.slots.tolist()):
                if (slot := self.slot(call, given)) is not None:
                    cache[self.place(slot, cache.shape[1])] = rows[row]


def right(op: str) -> tuple[Any, ...]:
    """A kernel without a fault."""
    return ((Paged if op == "attention.paged" else Update)().forward,)


def fault(name: str, found_by: str = "values", at: str = "a step") -> Callable[[type], None]:
    """Enter a mutant: the decorated class. `at` may be a part of a case's name."""

    def enter(cls: type) -> None:
        op = "attention.paged" if issubclass(cls, Paged) else "attention.update_cache"
        MUTANTS.append(Mutant(name, op, found_by, lambda: (cls().forward,), at=lambda trial: at in trial.case.name))

    return enter


@fault("pages are read in the order of the pool")
class _(Paged):
    def table(self, call, sequence):
        table = super().table(call, sequence)
        return (table[0] + torch.arange(len(table))) % len(call.k_cache) if len(table) else table


@fault("every sequence reads the pages of the first")
class _(Paged):
    def table(self, call, sequence):
        return super().table(call, 0).clamp(min=0)


@fault("a key's place in its page is that in its sequence's last page")
class _(Paged):
    def places(self, call, sequence, keys):
        page, place = super().places(call, sequence, keys)
        return page, place.flip(0)


@fault("the page that is not full is left out")
class _(Paged):
    def past(self, call, position, length):
        return super().past(call, position, length) // call.k_cache.shape[1] * call.k_cache.shape[1]


@fault("the last page is read to its end")
class _(Paged):
    def past(self, call, position, length):
        size = call.k_cache.shape[1]
        most = -(-length // size) * size
        return min(super().past(call, position, length) + size - 1, most)


@fault("a query does not see itself")
class _(Paged):
    def past(self, call, position, length):
        return position if call.causal else length


@fault("queries stand at the first keys", at="several queries")
class _(Paged):
    def position(self, length, queries, query):
        return query if queries > 1 else length - 1


@fault("the queries of more than there are keys see them all", at="more queries than keys")
class _(Paged):
    def past(self, call, position, length):
        return length if position < 0 else super().past(call, position, length)


@fault("attention that is not causal is", at="not causal")
class _(Paged):
    def past(self, call, position, length):
        return position + 1


@fault("a window is one key too long", at="a window")
class _(Paged):
    def first(self, call, position):
        return max(position - call.window, 0) if call.window else 0


@fault("a window begins where its page does", at="a window")
class _(Paged):
    def first(self, call, position):
        return super().first(call, position) // call.k_cache.shape[1] * call.k_cache.shape[1]


@fault("the first keys are one too few", at="the first keys")
class _(Paged):
    def sunk(self, call):
        return max(call.first - 1, 0)


@fault("the first keys are seen as whole pages", at="a window and the first keys")
class _(Paged):
    def sunk(self, call):
        size = call.k_cache.shape[1]
        return -(-call.first // size) * size


@fault("a mask begins at the first of its sequence's own queries", at="under a mask")
class _(Paged):
    def told(self, call, mask, keys, length):
        column = keys - max(length - len(mask), 0)
        return (column < 0) | mask[column.clamp(min=0)]


@fault("a mask hides the keys before it", at="a tree")
class _(Paged):
    def told(self, call, mask, keys, length):
        return (keys >= length - len(mask)) & super().told(call, mask, keys, length)


@fault("slopes count from a sequence's end", at="a tree with a bias and alibi")
class _(Paged):
    def distance(self, keys, position, length):
        return length - 1 - keys


@fault("every sequence has the slopes of the first", at="alibi by sequence")
class _(Paged):
    def slopes(self, call, sequence):
        return super().slopes(call, 0)


@fault("a bias is of places in what is left of a sequence", at="a bias, a window")
class _(Paged):
    def bias(self, call, row, keys):
        return super().bias(call, row, keys - keys.min())


@fault("a head reads every so many-th head of keys", at="groups")
class _(Paged):
    def heads(self, call, of_keys, dim):
        return torch.cat([of_keys] * (call.q.shape[1] // call.k_cache.shape[2]), dim)


@fault("every head has the scale of the first", at="e4m3")
class _(Paged):
    def k_scale(self, call):
        scale = super().k_scale(call)
        return scale[:1] if isinstance(scale, Tensor) else scale


@fault("values are not scaled", at="e4m3")
class _(Paged):
    def v_scale(self, call):
        return 1.0


@fault("e5m2 is read as e4m3", at="e5m2")
class _(Paged):
    def read(self, call, cache):
        return super().read(call, cache.view(torch.float8_e4m3fn) if cache.dtype is torch.float8_e5m2 else cache)


@fault("the sink counts in each split", at="sinks")
class _(Paged):
    def faded(self, largest, higher):
        return super().faded(largest, higher) * 2


@fault("the log-sum-exp leaves out the sink", at="sinks")
class _(Paged):
    def lse(self, call, largest, total):
        if call.sinks is not None:
            total = total - (call.sinks.to(total.dtype)[:, None] - largest).exp()
        return super().lse(call, largest, total)


@fault("splits are joined as if their largest scores were one")
class _(Paged):
    def faded(self, largest, higher):
        return (largest > -math.inf).to(largest.dtype)


@fault("a query that sees nothing is NaN", at="more queries than keys")
class _(Paged):
    def result(self, mean, total):
        return mean / total


@fault("what lies past the length has a weight of zero, not none", "padding")
class _(Paged):
    def joined(self, call, q, sequence, keys, row, position):
        one, lse = super().joined(call, q, sequence, keys, row, position)
        size = call.k_cache.shape[1]
        if len(keys) and int(keys[-1]) % size != size - 1:
            last = keys[-1:] // size * size + size - 1
            one = one + 0 * self.rows(call, call.v_cache, sequence, last)[0]
        return one, lse


@fault("the table of an earlier call is kept", "changed_in_place")
class _(Paged):
    def table(self, call, sequence):
        self.known = getattr(self, "known", {})
        key = call.block_table.data_ptr(), tuple(call.block_table.shape)
        return self.known.setdefault(key, call.block_table.clone())[sequence].long().clamp(min=0)


@fault("a row that is left out goes to the last slot", at="some rows")
class _(Update):
    def slot(self, call, slot):
        return slot % (call.k_cache.shape[0] * call.k_cache.shape[1])


@fault("pages and places are exchanged", at="some rows")
class _(Update):
    def place(self, slot, size):
        return (slot % size, slot // size) if slot // size < size and slot % size < 3 else (slot // size, slot % size)


@fault("values are stored by the scale of keys", at="e4m3")
class _(Update):
    def scale(self, call, name):
        return call.k_scale


@fault("rows are multiplied by their scale", at="scaled")
class _(Update):
    def scale(self, call, name):
        scale = super().scale(call, name)
        return None if scale is None else 1 / scale


@fault("what 8 bits cannot hold becomes NaN", "magnitudes", at="e4m3")
class _(Update):
    def bounded(self, rows, most):
        return rows
