"""`attention.dense` over live blocks: a tile of queries at a time, memory linear in the sequence, forward and backward.

Dead blocks cost nothing, full ones no mask. Sums run in one order, so that repeated calls give the same bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpt_attention.dense import biases, scale_of, wide_dtype
from kpt_attention.dropout import kept, seed_of
from kpt_attention.plan import BLOCK, DEAD, FULL, allowed_keys, live_blocks
from kpt_core import Call

#: Blocks of keys that are multiplied at once, at most: scores of a tile then stay in a core's cache.
_RUN = 4
#: Scores of all heads and sequences that are computed at once, at most, where one head has less.
_SCORES = 1 << 20
_FEW_ROWS = 8


@dataclass(slots=True)
class _Part:
    """Sequences and heads of keys that are computed at once, each with its groups of queries.

    Attributes:
        batch: the sequences.
        heads: the heads of keys.
        tiles: rows of blocks, each with runs of live keys and whether they need the mask.
    """

    batch: slice
    heads: slice
    tiles: list[tuple[range, list[tuple[range, bool]]]]


def _parts(call: Call) -> Iterator[_Part]:
    batch, heads, queries, _ = call.q.shape
    groups, keys = heads // call.k.shape[1], call.k.shape[2]
    states = live_blocks(call, queries, keys) if queries and keys else None
    head = groups * min(queries, BLOCK) * min(keys, _RUN * BLOCK)
    of_batch = max(1, _SCORES // max(head * call.k.shape[1], 1))
    of_heads = call.k.shape[1] if of_batch > 1 else max(1, min(call.k.shape[1], _SCORES // max(head, 1)))
    known: dict[Any, list[tuple[range, list[tuple[range, bool]]]]] = {}
    for first in range(0, batch, of_batch):
        for begin in range(0, call.k.shape[1], of_heads):
            some = slice(first, min(first + of_batch, batch)), slice(begin, min(begin + of_heads, call.k.shape[1]))
            if states is None:
                yield _Part(*some, [(range(queries), [])] if queries else [])
                continue
            # What sequences and heads have in common is looked at once.
            at_batch = some[0] if states.shape[0] > 1 else slice(None)
            of_queries = slice(some[1].start * groups, some[1].stop * groups)
            at_heads = of_queries if states.shape[1] > 1 else slice(None)
            key = (at_batch.start, at_batch.stop, at_heads.start, at_heads.stop)
            if key not in known:
                mine = states[at_batch, at_heads].flatten(0, 1)
                known = {key: _tiles(mine.amax(0).tolist(), mine.amin(0).tolist(), queries, keys)}
            yield _Part(*some, known[key])


def _tiles(
    most: list[list[int]], least: list[list[int]], queries: int, keys: int
) -> list[tuple[range, list[tuple[range, bool]]]]:
    tiles = []
    for row, (live, full) in enumerate(zip(most, least, strict=True)):
        runs: list[tuple[range, bool]] = []
        for column, state in enumerate(live):
            if state == DEAD:
                continue
            masked = full[column] != FULL
            end = min((column + 1) * BLOCK, keys)
            if runs and runs[-1][0].stop == column * BLOCK and len(runs[-1][0]) < _RUN * BLOCK:
                runs[-1] = range(runs[-1][0].start, end), runs[-1][1] or masked
            else:
                runs.append((range(column * BLOCK, end), masked))
        tiles.append((range(row * BLOCK, min((row + 1) * BLOCK, queries)), runs))
    return tiles


class _Tile:
    """A tile of queries of a part: its scores against runs of keys, and their gradients.

    Tensors are `[B, Hkv, groups * rows, ...]` of the part, wide.
    """

    def __init__(self, call: Call, part: _Part, rows: range, clean: bool) -> None:
        self.call, self.part, self.rows, self.clean = call, part, rows, clean
        self.groups = call.q.shape[1] // call.k.shape[1]
        self.heads = slice(part.heads.start * self.groups, part.heads.stop * self.groups)
        self.wide = wide_dtype(call.q.dtype)
        self.q = self.of_queries(call.q)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return what belongs to the tile of `[B, Hq, Q, ...]`, in groups."""
        some: Tensor = tensor[self.part.batch, self.heads, self.rows.start : self.rows.stop].to(self.wide)
        return self.grouped(some)

    def of_keys(self, tensor: Tensor, keys: range) -> Tensor:
        """Return what belongs to a run of keys of `[B, Hkv, K, ...]`."""
        some: Tensor = tensor[self.part.batch, self.part.heads, keys.start : keys.stop].to(self.wide)
        return some

    def store(self, target: Tensor, value: Tensor) -> None:
        """Write to the tile's place of `[B, Hq, Q, ...]`."""
        some = value.unflatten(2, (self.groups, -1)).flatten(1, 2)
        target[self.part.batch, self.heads, self.rows.start : self.rows.stop] = some.to(target.dtype)

    def by_head(self, scores: Tensor) -> Tensor:
        """Return scores as `[B, Hq, rows, keys]`."""
        found: Tensor = scores.unflatten(2, (self.groups, -1)).flatten(1, 2)
        return found

    def grouped(self, scores: Tensor) -> Tensor:
        """Return `[B, Hq, rows, keys]` as the tile's tensors are."""
        found: Tensor = scores.unflatten(1, (-1, self.groups)).flatten(2, 3)
        return found

    def allowed(self, keys: range) -> Tensor | None:
        """Return which scores against a run of keys count, `[B or 1, Hq or 1, rows, keys]`."""
        found = allowed_keys(self.call, self.rows, keys, self.q.device)
        if found is None:
            return None
        found = found[self.part.batch] if found.shape[0] > 1 else found
        return found[:, self.heads] if found.shape[1] > 1 else found

    def _bias(self, keys: range) -> Tensor:
        bias: Tensor = self.call.bias
        some = (self.part.batch, self.heads, slice(self.rows.start, self.rows.stop), slice(keys.start, keys.stop))
        return bias[tuple(at if size > 1 else slice(None) for at, size in zip(some, bias.shape, strict=True))]

    def positions(self, keys: range) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries and the keys."""
        device = self.q.device
        rows = torch.arange(self.rows.start, self.rows.stop, device=device) + self.call.position
        return rows, torch.arange(keys.start, keys.stop, device=device)

    def scores(self, k: Tensor, keys: range, allowed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the scores against a run of keys, and the slope of the cap; what does not count is -inf."""
        call, slope = self.call, None
        scaled = self.q * scale_of(call)
        # Of few rows (steps of decoding) the transposed product reads keys twice as fast.
        scores = (k @ scaled.mT).mT.contiguous() if scaled.shape[2] <= _FEW_ROWS else scaled @ k.mT
        if call.softcap:
            capped = (scores / call.softcap).tanh_()
            slope = 1 - capped.square()
            scores = capped * call.softcap
        if call.alibi_slopes is not None or call.relative_bias is not None or call.bias is not None:
            each = self.by_head(scores)
            if call.alibi_slopes is not None or call.relative_bias is not None:
                each = biases(_of_heads(call, self.heads), each, *self.positions(keys))
            if call.bias is not None:
                each = each + self._bias(keys).to(self.wide)
            scores = self.grouped(each)
        if allowed is not None:
            scores = self.grouped(self.by_head(scores).masked_fill(~allowed, -math.inf))
        return scores, slope

    def kept(self, keys: range) -> Tensor | None:
        """Return by what dropout multiplies probabilities; None where there is none."""
        call = self.call
        if not call.dropout:
            return None
        batch, heads, queries, _ = call.q.shape
        b = torch.arange(batch, device=self.q.device)[self.part.batch, None, None, None]
        h = torch.arange(heads, device=self.q.device)[self.heads, None, None]
        q = torch.arange(queries, device=self.q.device)[self.rows.start : self.rows.stop, None]
        _, columns = self.positions(keys)
        found: Tensor = kept(call.dropout, seed_of(call), call.offset, (b * heads + h) * queries + q, columns)
        return self.grouped(found.to(self.wide) / (1 - call.dropout))

    def seen(self, allowed: Tensor | None) -> Tensor | None:
        """Return which keys of a run some query of the tile sees, `[B or 1, Hkv or 1, keys, 1]`; None for all."""
        if allowed is None or self.clean:
            return None
        some = allowed.any(-2)
        some = some.unflatten(1, (-1, self.groups)).any(2) if some.shape[1] > 1 else some
        return some.unsqueeze(-1)


def _of_heads(call: Call, heads: slice) -> Call:
    """Return the call with what is learned for some heads alone."""
    some = {
        name: value[heads] for name in ("alibi_slopes", "relative_bias") if (value := getattr(call, name)) is not None
    }
    return call._replace(**some)


def _finite(*tensors: Tensor) -> bool:
    """Return whether all are finite; perhaps False where a sum of finite numbers is not."""
    return all(bool(each.sum(dtype=wide_dtype(each.dtype)).isfinite()) for each in tensors)


def forward(call: Call) -> Any:
    """Return the output and the log-sum-exp; save the output, the largest scores and the sums of exponentials."""
    q, k, v = call.q, call.k, call.v
    wide = wide_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse, highest, sums = (q.new_empty(q.shape[:3], dtype=wide) for _ in range(3))
    clean = _finite(v)
    least = torch.finfo(wide).min
    for part in _parts(call):
        for rows, runs in part.tiles:
            tile = _Tile(call, part, rows, clean)
            shape = (*tile.q.shape[:3], 1)
            if call.sinks is None:
                largest, total = q.new_full(shape, -math.inf, dtype=wide), q.new_zeros(shape, dtype=wide)
            else:
                sinks = call.sinks.to(wide)[tile.heads].view(1, -1, tile.groups, 1)
                largest = sinks.expand(-1, -1, -1, len(rows)).flatten(2).unsqueeze(-1).expand(shape)
                total = (largest - largest.clamp(min=least)).exp()  # one; of a sink of -inf, which is none, zero
            mean = q.new_zeros((*tile.q.shape[:3], v.shape[3]), dtype=wide)
            for keys, masked in runs:
                allowed = tile.allowed(keys) if masked else None
                scores, _ = tile.scores(tile.of_keys(k, keys), keys, allowed)
                here = scores.amax(-1, keepdim=True)
                # One pass of softmax costs less than taking off, exponentials and their sum, which it tells, too.
                weights = scores.softmax(-1)
                if (none := here == -math.inf).any():
                    weights.masked_fill_(none, 0)
                part_of = 1 / weights.amax(-1, keepdim=True)
                higher = torch.maximum(largest, here)
                base = higher.clamp(min=least)
                fading, gain = (largest - base).exp(), (here - base).exp()
                gain = gain * part_of.masked_fill_(gain == 0, 0)
                total = total * fading + gain
                if (drop := tile.kept(keys)) is not None:
                    weights = weights * drop
                values, seen = tile.of_keys(v, keys), tile.seen(allowed)
                values = values if seen is None else values.masked_fill(~seen, 0)
                mean = mean * fading + (weights @ values) * gain
                largest = higher
            dead = total == 0
            total = total.masked_fill(dead, 1)
            tile.store(out, mean / total)
            largest = largest.clamp(min=least)
            each = largest, total, (largest + total.log()).masked_fill(dead, -math.inf)
            for target, value in zip((highest, sums, lse), each, strict=True):
                tile.store(target, value.squeeze(-1))
    return (out, lse if call.return_lse else None), (out, highest, sums) if call.needs else ()


def backward(
    call: Call, saved: tuple[Tensor, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> dict[str, Tensor | None]:
    """Return the gradients of what the call wants them of."""
    out, highest, sums = saved
    q, k, v = call.q, call.k, call.v
    wide = wide_dtype(q.dtype)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    # What all scores of a row lose, since its probabilities sum to one; the log-sum-exp gives it back.
    common = (grad_out.to(wide) * out.to(wide)).sum(-1)
    returned = torch.zeros_like(common) if grad_lse is None else grad_lse.to(wide)
    grads = {name: torch.zeros_like(getattr(call, name), dtype=wide, memory_format=torch.contiguous_format)
             for name in call.needs}  # fmt: skip
    clean = _finite(q, k, v, grad_out, returned)
    if not clean:  # what a row that sees nothing holds must reach nobody
        dead = highest == torch.finfo(wide).min
        common, returned = (each.masked_fill(dead, 0) for each in (common, returned))
    if "sinks" in grads:
        weights = (call.sinks.to(wide)[:, None] - highest).exp() / sums
        grads["sinks"] -= (weights * (common - returned)).sum((0, 2))
    for part in _parts(call):
        for rows, runs in part.tiles:
            tile = _Tile(call, part, rows, clean)
            given = tile.of_queries(grad_out)
            of_row = [tile.of_queries(each).unsqueeze(-1) for each in (highest, sums, common, returned)]
            if not clean:
                gone = tile.of_queries(dead).bool().unsqueeze(-1)
                tile.q, given = (each.masked_fill(gone, 0) for each in (tile.q, given))
            of_q = torch.zeros_like(tile.q)
            for keys, masked in runs:
                _backward_of_run(tile, keys, masked, _Rows(given, of_row, of_q, len(runs) == 1), grads)
            if "q" in grads:
                tile.store(grads["q"], of_q * scale_of(call))
    return {name: grad.to(getattr(call, name).dtype) for name, grad in grads.items()}


@dataclass(slots=True)
class _Rows:
    """Hold what the backward knows of a tile's rows.

    Attributes:
        given: gradient of the output.
        known: the largest score, the sum of the exponentials less that, the gradient times the output summed, and the
            gradient of the log-sum-exp.
        of_q: gradient of the scaled queries so far.
        whole: whether one run has all their keys.
    """

    given: Tensor
    known: list[Tensor]
    of_q: Tensor
    whole: bool


def _backward_of_run(tile: _Tile, keys: range, masked: bool, rows: _Rows, grads: dict[str, Tensor]) -> None:
    call, part = tile.call, tile.part
    highest, sums, common, returned = rows.known
    allowed = tile.allowed(keys) if masked else None
    seen = tile.seen(allowed)
    k, v = (tile.of_keys(each, keys) for each in (call.k, call.v))
    if seen is not None:
        k, v = (each.masked_fill(~seen, 0) for each in (k, v))
    scores, slope = tile.scores(k, keys, allowed)
    weights = scores.sub_(highest).exp_().div_(sums)
    change = rows.given @ v.mT
    drop = tile.kept(keys)
    if drop is not None:
        change = change * drop
    at = (part.batch, part.heads, slice(keys.start, keys.stop))
    if "v" in grads:
        grads["v"][at] += (weights if drop is None else weights * drop).mT @ rows.given
    # Summed here, it cancels to the last digit where one key has all of the weight.
    if rows.whole and call.sinks is None:
        common = (weights * change).sum(-1, keepdim=True)
    change = change.sub_(common - returned).mul_(weights)  # of the scores
    if not {"bias", "alibi_slopes", "relative_bias"}.isdisjoint(grads):
        _backward_of_biases(tile, keys, tile.by_head(change), grads)
    if slope is not None:
        change = change * slope
    if "q" in grads:
        rows.of_q += change @ k
    if "k" in grads:
        grads["k"][at] += (change.mT @ tile.q) * scale_of(call)


def _backward_of_biases(tile: _Tile, keys: range, change: Tensor, grads: dict[str, Tensor]) -> None:
    rows, columns = tile.positions(keys)
    distance = columns - rows[:, None]
    if "bias" in grads:
        target = grads["bias"]
        some = (tile.part.batch, tile.heads, slice(tile.rows.start, tile.rows.stop), slice(keys.start, keys.stop))
        at = tuple(each if size > 1 else slice(None) for each, size in zip(some, target.shape, strict=True))
        target[at] += change.sum_to_size(target[at].shape)
    if "alibi_slopes" in grads:
        grads["alibi_slopes"][tile.heads] -= (change * distance.abs()).sum((0, 2, 3))
    if "relative_bias" in grads:
        table = grads["relative_bias"]
        far = table.shape[1] // 2
        places = (distance.clamp(-far, far) + far).flatten()
        table[tile.heads] = table[tile.heads].index_add(1, places, change.sum(0).flatten(1))
