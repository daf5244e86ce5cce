"""Ops `attention.paged` and `attention.update_cache`: attention over keys and values that lie in pages of a cache.

A cache is a tensor `[pages, page_size, Hkv, D]`, as vLLM's and flash-attention's; a block table says which pages a
sequence has. `kpt_attention.kv_cache` keeps both.
"""

import math

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from .dense import DTYPES, wide_dtype

_NAME, _UPDATE = "attention.paged", "attention.update_cache"
#: What caches may be beside these: scales belong to them.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.float64)


def _readable(tensor: Tensor) -> bool:
    """Return whether values can be looked at without waiting for a device or breaking a graph."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _check_caches(name: str, call: Call, head_dims: tuple[int, int], dtype: torch.dtype, like: str) -> None:
    k_cache, v_cache = call.k_cache, call.v_cache
    shapes = f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)}"
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise InputError(
            f"{name}: caches must be [pages, page_size, heads, head_dim], as many and as long of keys and of values; "
            f"got {shapes}"
        )
    if (k_cache.shape[3], v_cache.shape[3]) != head_dims or 0 in (*head_dims, *k_cache.shape[1:3]):
        raise InputError(f"{name}: {like} needs caches of head_dim {head_dims[0]} and {head_dims[1]}; got {shapes}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (dtype, *FP8):
        raise InputError(
            f"{name}: caches must both have {like}'s dtype {dtype}, or float8_e4m3fn or float8_e5m2; got "
            f"{k_cache.dtype} and {v_cache.dtype}"
        )
    for scale_name in ("k_scale", "v_scale"):
        scale = getattr(call, scale_name)
        if scale is not None and (tuple(scale.shape) != (k_cache.shape[2],) or scale.dtype not in _SCALES):
            raise InputError(
                f"{name}: {scale_name} must be float32 [{k_cache.shape[2]}], one for each head of the cache; got "
                f"{scale.dtype} {list(scale.shape)}"
            )


def _check_devices(name: str, call: Call, first: str, others: tuple[str, ...]) -> None:
    device = getattr(call, first).device
    for each in others:
        value = getattr(call, each)
        if value is not None and value.device != device:
            raise InputError(
                f"{name}: all tensors must be on one device; got {first} on {device} and {each} on {value.device}"
            )


def _check(call: Call) -> None:
    q, table, lengths, ends = call.q, call.block_table, call.lengths, call.cu_seqlens_q
    if q.dim() != 3 or q.dtype not in DTYPES:
        raise InputError(
            f"{_NAME}: q must be float32, bfloat16, float16 or float64 [tokens, heads, head_dim]; got {q.dtype} "
            f"{list(q.shape)}"
        )
    _check_caches(_NAME, call, (q.shape[2], call.v_cache.shape[-1]), q.dtype, "q")
    kv_heads = call.k_cache.shape[2]
    if q.shape[1] % kv_heads:
        raise InputError(f"{_NAME}: heads of the caches ({kv_heads}) must divide those of q ({q.shape[1]})")
    if table.dim() != 2 or table.dtype is not torch.int32 or lengths.dtype is not torch.int32:
        raise InputError(
            f"{_NAME}: block_table must be int32 [sequences, pages], lengths int32 [sequences]; got {table.dtype} "
            f"{list(table.shape)} and {lengths.dtype} {list(lengths.shape)}"
        )
    if tuple(lengths.shape) != (table.shape[0],):
        raise InputError(f"{_NAME}: block_table has {table.shape[0]} sequences, lengths {list(lengths.shape)}")
    if ends is None and q.shape[0] != table.shape[0]:
        raise InputError(
            f"{_NAME}: without cu_seqlens_q each sequence has one query; got {q.shape[0]} queries of {table.shape[0]} "
            "sequences"
        )
    if ends is not None and (ends.dtype is not torch.int32 or tuple(ends.shape) != (table.shape[0] + 1,)):
        raise InputError(
            f"{_NAME}: cu_seqlens_q must be int32 [{table.shape[0] + 1}]; got {ends.dtype} {list(ends.shape)}"
        )
    if call.sinks is not None and (tuple(call.sinks.shape) != (q.shape[1],) or not call.sinks.is_floating_point()):
        raise InputError(
            f"{_NAME}: sinks must be floating [{q.shape[1]}]; got {call.sinks.dtype} {list(call.sinks.shape)}"
        )
    if call.window < 0 or (call.window and not call.causal):
        raise InputError(
            f"{_NAME}: window must be positive, of causal attention, or 0 for none; got {call.window} with "
            f"causal={call.causal}"
        )
    if call.first < 0 or (call.first and not call.window):
        raise InputError(
            f"{_NAME}: first must be positive, beside a window, or 0 for none; got {call.first} with "
            f"window={call.window}"
        )
    if call.softcap < 0:
        raise InputError(f"{_NAME}: softcap must be positive, or 0 for none; got {call.softcap}")
    _check_scores(call)
    _check_devices(
        _NAME,
        call,
        "q",
        ("k_cache", "v_cache", "block_table", "lengths", "cu_seqlens_q", "sinks", "k_scale", "v_scale",
         "alibi_slopes", "bias", "mask"),
    )  # fmt: skip
    if _readable(table) and _readable(lengths) and table.shape[0] and (ends is None or _readable(ends)):
        _check_values(call)


def _check_scores(call: Call) -> None:
    """Check what changes scores, and the mask."""
    (tokens, heads, _), sequences = call.q.shape, call.block_table.shape[0]
    slopes, bias, mask = call.alibi_slopes, call.bias, call.mask
    if slopes is not None and (
        tuple(slopes.shape) not in ((heads,), (sequences, heads)) or not slopes.is_floating_point()
    ):
        raise InputError(
            f"{_NAME}: alibi_slopes must be floating [{heads}] or [{sequences}, {heads}]; got {slopes.dtype} "
            f"{list(slopes.shape)}"
        )
    if bias is not None and (
        bias.dim() != 3
        or bias.shape[0] not in (1, heads)
        or bias.shape[1] not in (1, tokens)
        or not bias.is_floating_point()
    ):
        raise InputError(
            f"{_NAME}: bias must be floating [{heads} or 1, {tokens} or 1, keys]; got {bias.dtype} {list(bias.shape)}"
        )
    if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 2 or mask.shape[0] != tokens):
        raise InputError(
            f"{_NAME}: mask must be bool [{tokens}, n], over the last n keys of each query's sequence; got "
            f"{mask.dtype} {list(mask.shape)}"
        )


def _check_values(call: Call) -> None:
    table, pages, size = call.block_table, call.k_cache.shape[0], call.k_cache.shape[1]
    least, most = (int(each) for each in call.lengths.aminmax())
    if least < 0 or most > table.shape[1] * size:
        raise InputError(
            f"{_NAME}: lengths must be between 0 and {table.shape[1] * size}, which {table.shape[1]} pages of {size} "
            f"hold; got {least} to {most}"
        )
    if call.bias is not None and call.bias.shape[2] < most:
        raise InputError(
            f"{_NAME}: bias must be for {most} keys, as the longest sequence has, or more; got {list(call.bias.shape)}"
        )
    ends = call.cu_seqlens_q
    if ends is not None and (int(ends[0]) != 0 or int(ends[-1]) != call.q.shape[0] or bool((ends.diff() < 0).any())):
        raise InputError(f"{_NAME}: cu_seqlens_q must rise from 0 to {call.q.shape[0]}; got {ends.tolist()}")
    if table.shape[1] == 0:
        return
    low, high = (int(each) for each in table.aminmax())
    if low < 0 or high >= pages:  # what no query sees may be anything
        sequence, begin, past = spans(call)
        place = torch.arange(table.shape[1], device=table.device) * size
        live = ((begin[:, None] < place + size) & (past > begin)[:, None]) | (place < call.first)
        live = live & (past[:, None] > place)
        wrong = live & ((table < 0) | (table >= pages))[sequence]
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            found = int(table[sequence[row], column])
            raise InputError(
                f"{_NAME}: block_table says page {found} at [{int(sequence[row])}, {column}], which query {row} sees; "
                f"the caches have {pages} pages"
            )


def spans(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's sequence, the first key of its window, and the first after what it sees; int64 `[tokens]`."""
    sequence, position = places(call)
    ends_here = call.causal and call.mask is None
    past = ((position + 1) if ends_here else call.lengths.long()[sequence]).clamp(min=0)
    begin = (position + 1 - call.window).clamp(min=0) if call.window else torch.zeros_like(past)
    return sequence, begin, past


def places(call: Call) -> tuple[Tensor, Tensor]:
    """Return each query's sequence, and its place among the keys of that; int64 `[tokens]`."""
    ends, lengths, rows = call.cu_seqlens_q, call.lengths.long(), torch.arange(call.q.shape[0], device=call.q.device)
    if ends is None:
        return rows, lengths - 1
    sequence = torch.searchsorted(ends.contiguous(), rows.int(), right=True) - 1
    sequence = sequence.clamp(0, max(len(lengths) - 1, 0))
    return sequence, lengths[sequence] - ends[sequence + 1] + rows


def visible(call: Call, keys: Tensor) -> Tensor:
    """Return which keys of its sequence each query sees: bool `[tokens, keys]`.

    Args:
        call: of the op.
        keys: int64 `[keys]`: places in a sequence.
    """
    sequence, begin, past = spans(call)
    seen: Tensor = (keys < past[:, None]) & ((keys >= begin[:, None]) | (keys < call.first))
    count = 0 if call.mask is None else call.mask.shape[1]
    if count:
        column = keys + count - call.lengths.long()[sequence, None]
        seen = seen & ((column < 0) | call.mask.gather(1, column.clamp(0, count - 1)))
    return seen


def _fake(call: Call) -> tuple[Tensor, Tensor | None]:
    q = call.q
    out = q.new_empty((*q.shape[:2], call.v_cache.shape[3]))
    return out, q.new_empty(q.shape[:2], dtype=wide_dtype(q.dtype)) if call.return_lse else None


def _flops(call: Call) -> int:
    keys = call.block_table.shape[1] * call.k_cache.shape[1]
    return int(2 * call.q.shape[0] * call.q.shape[1] * keys * (call.q.shape[2] + call.v_cache.shape[3]))


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Queries, sequences and pages, rounded since they vary; size of pages, groups, dims and the cache's dtype."""
    (tokens, heads, dim), (_, page, kv_heads, value_dim) = call.q.shape, call.v_cache.shape
    sizes = map(next_power_of_two, (tokens, *call.block_table.shape))
    return (*sizes, page, heads // kv_heads, dim, value_dim, str(call.k_cache.dtype))


@op(_NAME, check=_check, fake=_fake, optional_results={1: "return_lse"}, flops=_flops, size_key=_size_key)
def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    return_lse: bool = False,
    causal: bool = True,
    window: int = 0,
    first: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend over keys and values in pages: steps of decoding, prefills and parts of them, any mix of these.

    The last query of a sequence stands at its last key, which is in the cache already (`attention.update_cache`). A
    query that sees no key gets zeros and a log-sum-exp of -inf (of its sink, where there is one). What no query sees
    has no influence, NaN neither, and pages that hold nothing else are not read.

    Queries stand at consecutive places, also under a mask: the tokens of a tree, some of which stand at one position
    of the text, count for windows and slopes as they lie.

    Args:
        q: `[tokens, Hq, D]` float32, bfloat16, float16 or float64: the queries of all sequences, one after another.
        k_cache: `[pages, page_size, Hkv, D]` of q's dtype, float8_e4m3fn or float8_e5m2; `Hkv` divides `Hq`.
        v_cache: `[pages, page_size, Hkv, Dv]` of the same dtype.
        block_table: int32 `[sequences, most pages]`: which pages hold a sequence's keys, in their order. Pages that
            nobody sees, past its length or before its window and not among the `first`, may be any number.
        lengths: int32 `[sequences]`: keys of each sequence.
        cu_seqlens_q: int32 `[sequences + 1]`: where each sequence's queries end, from 0; one query for each if None.
        sinks: `[Hq]`: the score of one more key, which has no value.
        k_scale: float32 or float64 `[Hkv]`: what numbers of the key cache are multiplied by.
        v_scale: likewise, of the value cache.
        alibi_slopes: floating `[Hq]` or `[sequences, Hq]`: so much is subtracted from a score for each step between
            query and key (arXiv:2108.12409).
        bias: floating `[Hq or 1, tokens or 1, keys]`, added to the scores, by the place of a key in its sequence; for
            as many keys as the longest sequence has, or more.
        mask: bool `[tokens, n]`: which of the last n keys of its sequence a query sees, in place of `causal`; it sees
            all before these. A tree of guessed tokens behind what is cached is one, see `Step.tree`.
        return_lse: whether to return the log-sum-exp.
        causal: a query sees keys up to its own position; else all of its sequence.
        window: a query sees the last `window` keys, its own included; 0 for all.
        first: beside a window: a query sees so many keys at the sequence's begin as well (arXiv:2309.17453).
        scale: of the scores, `1 / sqrt(D)` if None.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.

    Returns:
        The output `[tokens, Hq, Dv]` in q's dtype; and the log-sum-exp `[tokens, Hq]` float32 (float64 for float64),
        None where nobody asked.

    Raises:
        InputError: a shape, dtype, device or number does not fit; on a CPU also a length or page that is not there.

    Source: arXiv:2309.06180 (PagedAttention).
    """
    call = paged.bind(
        q, k_cache, v_cache, block_table, lengths, cu_seqlens_q, sinks, k_scale, v_scale, alibi_slopes, bias, mask,
        return_lse=return_lse, causal=causal, window=window, first=first, scale=scale, softcap=softcap,
    )  # fmt: skip
    wide, groups = wide_dtype(q.dtype), q.shape[1] // k_cache.shape[2]
    sequence, position = places(call)
    place = torch.arange(block_table.shape[1] * k_cache.shape[1], device=q.device)
    allowed = visible(call, place)
    seen = torch.zeros((len(lengths), len(place)), dtype=torch.int32, device=q.device)
    seen = seen.index_add(0, sequence, allowed.int()) > 0
    k, v = (_of_pages(cache, block_table, seen)[sequence].repeat_interleave(groups, 2) for cache in (k_cache, v_cache))
    scores = torch.einsum("thd,tkhd->thk", q.to(wide) * scale_of(call), k.to(wide))
    if k_scale is not None:
        scores = scores * k_scale.to(wide).repeat_interleave(groups)[:, None]
    scores = scores if softcap == 0 else softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(wide).expand(len(lengths), -1)[sequence]
        scores = scores - slopes[..., None] * (place - position[:, None]).abs()[:, None]
    if bias is not None:
        known = bias.to(wide)[..., : len(place)].transpose(0, 1)  # no sequence has keys past those that it is for
        scores = scores + torch.nn.functional.pad(known, (0, len(place) - known.shape[2]))
    scores = scores.masked_fill(~allowed[:, None], -math.inf)
    # One more column: the sink, or nothing, so that no row is empty.
    column = q.new_full((), -math.inf, dtype=wide) if sinks is None else sinks.to(wide)[:, None]
    scores = torch.cat((scores, column.expand(*q.shape[:2], 1)), -1)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    dead = total == 0
    total = total.masked_fill(dead, 1)
    lse = (largest + total.log()).masked_fill(dead, -math.inf).squeeze(-1)
    weights = (exponentials / total)[..., :-1]
    out = torch.einsum("thk,tkhd->thd", weights.to(q.dtype), v.to(q.dtype))
    if v_scale is not None:
        out = (out.to(wide) * v_scale.to(wide).repeat_interleave(groups)[:, None]).to(q.dtype)
    return out, lse if return_lse else None


def scale_of(call: Call) -> float:
    """Return what products of queries and keys are multiplied by."""
    return float(call.scale) if call.scale is not None else 1 / math.sqrt(call.q.shape[2])


def _of_pages(cache: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    """Return the keys of each sequence, `[sequences, keys, Hkv, D]`, zero where nobody sees them."""
    cache = cache.to(torch.float32) if cache.dtype in FP8 else cache
    if len(cache) == 0:
        return cache.new_zeros((*seen.shape, *cache.shape[2:]))
    found = cache[table.long().clamp(0, len(cache) - 1)].flatten(1, 2)
    return found.masked_fill(~seen[..., None, None], 0)


def _check_update(call: Call) -> None:
    k, v, slots = call.k, call.v, call.slots
    if not k.dim() == v.dim() == 3 or k.shape[:2] != v.shape[:2] or k.dtype not in DTYPES or k.dtype != v.dtype:
        raise InputError(
            f"{_UPDATE}: k and v must be [tokens, heads, head_dim] of one dtype of float32, bfloat16, float16 and "
            f"float64; got {k.dtype} {list(k.shape)} and {v.dtype} {list(v.shape)}"
        )
    _check_caches(_UPDATE, call, (k.shape[2], v.shape[2]), k.dtype, "k")
    if k.shape[1] != call.k_cache.shape[2]:
        raise InputError(f"{_UPDATE}: k has {k.shape[1]} heads, the caches {call.k_cache.shape[2]}")
    if tuple(slots.shape) != (k.shape[0],) or slots.dtype is not torch.int64:
        raise InputError(f"{_UPDATE}: slots must be int64 [{k.shape[0]}]; got {slots.dtype} {list(slots.shape)}")
    _check_devices(_UPDATE, call, "k_cache", ("v_cache", "k", "v", "slots", "k_scale", "v_scale"))
    room = call.k_cache.shape[0] * call.k_cache.shape[1]
    if _readable(slots) and len(slots) and int(slots.max()) >= room:
        raise InputError(
            f"{_UPDATE}: slot {int(slots.max())}; the caches have {room}, in pages of {call.k_cache.shape[1]}"
        )


def _fake_update(call: Call) -> None:
    """Give nothing: how many rows the reference writes depends on the slots."""


@op(_UPDATE, check=_check_update, fake=_fake_update, mutates=("k_cache", "v_cache"))
def update_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write keys and values into their slots of a paged cache.

    Args:
        k_cache: `[pages, page_size, Hkv, D]`, written.
        v_cache: `[pages, page_size, Hkv, Dv]`, written.
        k: `[tokens, Hkv, D]`, of the caches' dtype unless that is float8_e4m3fn or float8_e5m2.
        v: `[tokens, Hkv, Dv]`.
        slots: int64 `[tokens]`: `page * page_size + place`, none twice; a negative one is left out.
        k_scale: float32 or float64 `[Hkv]`: what numbers of the key cache stand for, as `attention.paged` takes it:
            they are `k / k_scale`, computed in float32, and at most the dtype's largest number.
        v_scale: likewise, of the value cache.

    Raises:
        InputError: a shape, dtype, device or, on a CPU, a slot does not fit.
    """
    kept = slots >= 0
    places = slots[kept]
    page, place = places // k_cache.shape[1], places % k_cache.shape[1]
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        made = stored(rows[kept], scale, cache.dtype)
        if cache.dtype in FP8:  # torch writes no rows of 8 bits
            cache.view(torch.uint8).index_put_((page, place), made.view(torch.uint8))
        else:
            cache.index_put_((page, place), made)


def stored(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what a cache of a dtype holds of rows `[tokens, Hkv, D]`."""
    if scale is not None:
        rows = rows.to(wide_dtype(rows.dtype)) / scale[:, None]
    if dtype in FP8:
        most = torch.finfo(dtype).max
        rows = rows.to(torch.float32).clamp(-most, most)
    return rows.to(dtype)
