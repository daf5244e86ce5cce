"""`attention.paged` in plain PyTorch: the pages of a sequence are brought together, and `attention.dense` attends.

Of few queries, as steps of decoding have, only so many pages at once as stay in a cache: memory that is new costs more
than all else.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kpt_attention.dense import dense, wide_dtype
from kpt_attention.masks import causal as causal_mask
from kpt_attention.masks import dense_mask, global_tokens, sliding_window
from kpt_attention.paged import FP8, scale_of, stored, visible
from kpt_attention.plan import Plan
from kpt_core import Call

#: Rows of queries of a head of keys up to which no pages but a few are brought together.
_FEW = 16
#: Bytes that are brought together at once.
_BYTES = 1 << 22

_Room = dict[torch.dtype, Tensor]


def forward(call: Call) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp."""
    q, wide = call.q, wide_dtype(call.q.dtype)
    out = q.new_zeros((*q.shape[:2], call.v_cache.shape[3]))
    lse = q.new_empty(q.shape[:2], dtype=wide) if call.return_lse else None
    room: _Room = {}
    parted = not (call.alibi_slopes is None and call.bias is None and call.mask is None)
    ends = list(range(len(q) + 1)) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for number, length in enumerate(call.lengths.tolist()):
        rows = slice(ends[number], ends[number + 1])
        if rows.start == rows.stop:
            continue
        queries = rows.stop - rows.start
        few = queries * (q.shape[1] // call.k_cache.shape[2]) <= _FEW and length > 0
        own = _own(call, number, rows) if parted else call
        if few and (queries == 1 or not call.causal) and call.mask is None:
            found, sums = _few(own, q[rows], call.block_table[number], length, room)
        else:
            found, sums = _sequence(own, q[rows], call.block_table[number], length)
        out[rows] = found
        if lse is not None:
            lse[rows] = sums
    return out, lse


def _own(call: Call, number: int, rows: slice) -> Call:
    """Return the call with what a sequence has of slopes, `[Hq]`, of the bias, and of the mask."""
    slopes, bias, mask = call.alibi_slopes, call.bias, call.mask
    return call._replace(
        alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[number],
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, rows],
        mask=None if mask is None else mask[rows],
    )


def _sequence(call: Call, q: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Attend with the queries of one sequence, `[queries, Hq, D]`."""
    queries, size = len(q), call.k_cache.shape[1]
    begin = max(length - queries + 1 - call.window, 0) if call.window else 0
    if call.first == 0:
        kept = [range(begin // size * size, length)]
    elif call.first >= begin:
        kept = [range(length)]
    elif call.alibi_slopes is None:
        kept = [range(call.first), range(begin, length)]
    else:  # distances count the keys between, which nobody sees
        kept, table = [range(length)], table.clamp(min=0)
    k, v = (_rows(cache, table, kept, q.dtype) for cache in (call.k_cache, call.v_cache))
    bias = None if call.bias is None else _at(call.bias, kept)[None]
    position, keys = length - queries, sum(map(len, kept))
    shift = length - keys
    if call.mask is not None:
        place = torch.cat([torch.arange(each.start, each.stop, device=q.device) for each in kept])
        plan = dense_mask(_seen(call, q, length, place)).plan(queries, keys, offset=position - shift, device=q.device)
    elif call.window and keys > call.window:
        mask = sliding_window(call.window)
        mask = mask if not call.first else mask | global_tokens(call.first)
        plan = (causal_mask() & mask).plan(queries, keys, offset=position - shift, device=q.device)
    else:
        plan = Plan(causal=call.causal, position=position - shift)
    scaled = q
    if call.k_scale is not None:
        scaled = q.to(wide_dtype(q.dtype)) * call.k_scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]
        scaled, k, v = (each.to(scaled.dtype) for each in (scaled, k, v))
    out, lse = dense(
        scaled.transpose(0, 1)[None], k, v, **plan.arguments(queries, keys), bias=bias,
        alibi_slopes=call.alibi_slopes, sinks=call.sinks, return_lse=call.return_lse, scale=call.scale,
        softcap=call.softcap,
    )  # fmt: skip
    out = out[0].transpose(0, 1)
    if call.v_scale is not None:
        out = out.to(wide_dtype(q.dtype)) * call.v_scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]
    return out.to(q.dtype), None if lse is None else lse[0].transpose(0, 1)


def _seen(call: Call, q: Tensor, length: int, place: Tensor) -> Tensor:
    """Return which keys, by their places, the queries of one sequence see under their mask: `[queries, keys]`."""
    device = q.device
    alone = call._replace(
        q=q,
        lengths=torch.tensor([length], device=device),
        cu_seqlens_q=torch.tensor([0, len(q)], dtype=torch.int32, device=device),
    )
    return visible(alone, place)


def _few(call: Call, q: Tensor, table: Tensor, length: int, room: _Room) -> tuple[Tensor, Tensor | None]:
    """Attend with queries of one sequence that see the same keys, `[queries, Hq, D]`."""
    (queries, heads, dim), (_, size, kv_heads, value_dim) = q.shape, call.v_cache.shape
    wide = wide_dtype(q.dtype)
    rows = (q.to(wide) * scale_of(call)).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    if call.k_scale is not None:
        rows = rows * call.k_scale.to(wide)[:, None, None]
    begin = max(length - call.window, 0) if call.window else 0
    step = max(1, _BYTES // (size * kv_heads * max(dim, value_dim) * wide.itemsize)) * size
    # Keys of each piece, from where a page begins.
    pieces = [range(max(least, start), min(start + step, past))
              for least, past in ((0, min(call.first, begin)), (begin, length))
              for start in range(least // size * size, past, step)]  # fmt: skip
    scores = torch.cat([rows @ some.mT for some in _pieces(call.k_cache, table, pieces, wide, room)], -1)
    scores = scores if call.softcap == 0 else call.softcap * (scores / call.softcap).tanh_()
    added = _added(call, queries, length, pieces)
    scores = scores if added is None else scores + added.expand(heads, queries, -1).reshape(scores.shape)
    largest, sinks = scores.amax(-1, keepdim=True), None
    if call.sinks is not None:
        sinks = call.sinks.to(wide).view(kv_heads, -1, 1).repeat_interleave(queries, 1)
        largest = torch.maximum(largest, sinks)
    largest = largest.clamp(min=torch.finfo(wide).min)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks - largest).exp()
    out = rows.new_zeros((*rows.shape[:2], value_dim))
    parts = weights.split([len(each) for each in pieces], -1)
    for part, some in zip(parts, _pieces(call.v_cache, table, pieces, wide, room), strict=True):
        out.baddbmm_(part, some)
    out = out / total.masked_fill(total == 0, 1)
    if call.v_scale is not None:
        out = out * call.v_scale.to(wide)[:, None, None]
    out, lse = (each.view(heads, queries, -1).transpose(0, 1) for each in (out, largest + total.log()))
    return out.to(q.dtype), lse[..., 0] if call.return_lse else None


def update(call: Call) -> None:
    """Write rows into their slots, where reading these costs nothing: none is copied unless one is left out."""
    slots, rows = call.slots, (call.k, call.v)
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        slots, rows = slots[kept], (call.k[kept], call.v[kept])
    scales = (call.k_scale, call.v_scale)
    for cache, own, scale in zip((call.k_cache, call.v_cache), rows, scales, strict=True):
        size, bits = cache.shape[1], cache.view(torch.uint8) if cache.dtype in FP8 else cache
        made = stored(own, scale, cache.dtype).view(bits.dtype)
        if bits.stride(0) == size * bits.stride(1):
            bits.flatten(0, 1).index_copy_(0, slots, made)
        else:
            bits.index_put_((slots // size, slots % size), made)


def _pieces(cache: Tensor, table: Tensor, pieces: list[range], wide: torch.dtype, room: _Room) -> Iterator[Tensor]:
    """Yield some keys or values at a time, `[Hkv, keys, D]`, always in the same place."""
    size, bits = cache.shape[1], cache.view(torch.uint8) if cache.dtype in FP8 else cache
    for keys in pieces:
        begin, end = keys.start // size, -(-keys.stop // size)
        shape = (end - begin, *bits.shape[1:])
        found = torch.index_select(bits, 0, table[begin:end], out=_place(room, bits, shape, bits.dtype))
        if cache.dtype is not wide:
            found = _place(room, bits, shape, wide).copy_(found.view(cache.dtype))
        yield found.flatten(0, 1)[keys.start - begin * size : keys.stop - begin * size].transpose(0, 1)


def _place(room: _Room, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return room for a shape, where there was some before if that is large enough."""
    count = math.prod(shape)
    if dtype not in room or len(room[dtype]) < count:
        room[dtype] = like.new_empty(count, dtype=dtype)
    return room[dtype][:count].view(shape)


def _added(call: Call, queries: int, length: int, pieces: list[range]) -> Tensor | None:
    """Return what is added to the scores of one sequence's queries, `[Hq or 1, queries or 1, keys]`, if anything."""
    wide, device, added = wide_dtype(call.q.dtype), call.q.device, None
    if call.bias is not None:
        added = _at(call.bias, pieces).to(wide)
    if call.alibi_slopes is not None:
        place = torch.cat([torch.arange(each.start, each.stop, device=device) for each in pieces])
        distance = (place - torch.arange(length - queries, length, device=device)[:, None]).abs()
        lower = call.alibi_slopes.to(wide)[:, None, None] * -distance
        added = lower if added is None else added + lower
    return added


def _at(bias: Tensor, kept: list[range]) -> Tensor:
    """Return a bias of some keys."""
    some = [bias[..., each.start : each.stop] for each in kept]
    return some[0] if len(some) == 1 else torch.cat(some, -1)


def _rows(cache: Tensor, table: Tensor, kept: list[range], dtype: torch.dtype) -> Tensor:
    """Return some keys or values of one sequence, `[1, Hkv, keys, D]`."""
    found, size = [], cache.shape[1]
    for keys in kept:
        begin = keys.start // size
        pages = table[begin : -(-keys.stop // size)]
        if cache.dtype in FP8:
            rows = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).to(dtype)
        else:
            rows = cache.index_select(0, pages)
        found.append(rows.flatten(0, 1)[keys.start - begin * size : keys.stop - begin * size])
    rows = found[0] if len(found) == 1 else torch.cat(found)
    return rows.transpose(0, 1)[None]
