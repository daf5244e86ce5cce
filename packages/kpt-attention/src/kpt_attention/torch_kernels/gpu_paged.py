"""`attention.paged` and `attention.update_cache` on GPUs: pages of all sequences at once, no value read on the host.

Steps of decoding: queries of the heads of a group are rows of one head, so that no key is repeated. SDPA attends where
a mask is all there is; else scores are computed in float32. Prefills: one call of `attention.dense`, in which each
query sees its own sequence's keys. Keys are copied once: a call reads and writes the caches' share of it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kpt_attention.dense import dense, wide_dtype
from kpt_attention.paged import FP8, places, scale_of, spans, stored, visible
from kpt_core import Call, Refusal

#: Bytes that keys or values of all sequences may take when they are brought together.
_MOST_BYTES = 4 << 30
#: Likewise what is added to the scores of several queries of each sequence, by all sequences' keys.
_MOST_ADDED = 1 << 30


def unsupported(call: Call) -> Refusal | str | None:
    """Return why it does not take a call."""
    if call.cu_seqlens_q is not None:
        return "several queries of a sequence; this kernel is for steps of decoding"
    return _too_much(call)


def unsupported_prefill(call: Call) -> Refusal | str | None:
    """Return why the kernel for several queries of a sequence does not take a call."""
    if call.cu_seqlens_q is None:
        return "one query of each sequence; another kernel is for steps of decoding"
    if call.alibi_slopes is not None or call.bias is not None or call.mask is not None:
        heads = 1 if call.alibi_slopes is None and (call.bias is None or call.bias.shape[0] == 1) else call.q.shape[1]
        added = heads * len(call.q) * call.block_table.numel() * call.k_cache.shape[1] * 4
        if added > _MOST_ADDED:
            return Refusal(
                "what is added to scores would take {added:.1f} GiB; at most {most:.0f} GiB", added=added / 2**30,
                most=_MOST_ADDED / 2**30,
            )  # fmt: skip
    return _too_much(call)


def _too_much(call: Call) -> Refusal | str | None:
    if not (call.q.numel() and call.v_cache.numel() and call.block_table.numel()):
        return "there is nothing to compute"
    (_, size, kv_heads, dim), pages = call.v_cache.shape, call.block_table.numel()
    needed = pages * size * kv_heads * max(dim, call.q.shape[2]) * wide_dtype(call.q.dtype).itemsize
    if needed > _MOST_BYTES:
        return Refusal(
            "keys of all sequences would take {needed:.1f} GiB at once; at most {most:.0f} GiB",
            needed=needed / 2**30, most=_MOST_BYTES / 2**30,
        )  # fmt: skip
    return None


def forward(call: Call) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp."""
    q, kv_heads = call.q, call.k_cache.shape[2]
    place = torch.arange(call.block_table.shape[1] * call.k_cache.shape[1], device=q.device)
    allowed = visible(call, place)
    rows = q.unflatten(1, (kv_heads, -1))
    k, v = (_of_pages(cache, call.block_table, allowed, q.dtype) for cache in (call.k_cache, call.v_cache))
    others = (call.k_scale, call.v_scale, call.sinks, call.alibi_slopes, call.bias)
    if not call.return_lse and not call.softcap and all(each is None for each in others):
        mask = allowed[:, None, None]
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=call.scale)
        # Of a row that sees nothing torch's kernels make zeros or NaN.
        out = out.masked_fill(~allowed.any(1)[:, None, None, None], 0)
        return out.flatten(1, 2).contiguous(), None
    out, lse = _by_scores(call, rows, k, v, place, allowed)
    return out.flatten(1, 2).to(q.dtype).contiguous(), lse.flatten(1, 2).contiguous() if call.return_lse else None


def prefill(call: Call) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp, of several queries of each sequence."""
    q, heads = call.q, call.q.shape[1] // call.k_cache.shape[2]
    sequence, begin, past = spans(call)
    at = sequence * (call.block_table.shape[1] * call.k_cache.shape[1])
    kept = [torch.stack((at + begin, at + torch.maximum(begin, past)), -1)]
    if call.first:
        kept.insert(0, torch.stack((at, at + begin.clamp(max=call.first)), -1))
    intervals = torch.stack(kept, 1).int()[None, None]
    dtype = q.dtype if call.k_scale is None and call.v_scale is None else wide_dtype(q.dtype)
    k, v = (_rows_of(cache, call.block_table, dtype) for cache in (call.k_cache, call.v_cache))
    rows = q.to(dtype)
    if call.k_scale is not None:
        rows = rows * call.k_scale.to(dtype).repeat_interleave(heads)[:, None]
    out, lse = dense(
        rows.transpose(0, 1)[None], k, v, intervals=intervals, bias=_added(call, sequence), sinks=call.sinks,
        return_lse=call.return_lse, scale=call.scale, softcap=call.softcap,
    )  # fmt: skip
    out = out[0].transpose(0, 1)
    if call.v_scale is not None:
        out = out * call.v_scale.to(dtype).repeat_interleave(heads)[:, None]
    return out.to(q.dtype).contiguous(), None if lse is None else lse[0].transpose(0, 1).contiguous()


def _added(call: Call, sequence: Tensor) -> Tensor | None:
    """Return what is added to the scores of all sequences' keys, `[1, Hq or 1, tokens, S * keys]`, if anything is."""
    (sequences, pages), size, wide = call.block_table.shape, call.k_cache.shape[1], wide_dtype(call.q.dtype)
    if call.alibi_slopes is None and call.bias is None and call.mask is None:
        return None
    place = torch.arange(pages * size, device=call.q.device)
    own = torch.zeros((1, len(call.q), len(place)), dtype=wide, device=call.q.device)
    if call.mask is not None:  # a tree's; it hides
        own = own.masked_fill(~visible(call, place), -math.inf)
    if call.bias is not None:
        known = call.bias.to(wide)[..., : len(place)]  # no sequence has keys past those that it is for
        own = own + F.pad(known, (0, len(place) - known.shape[2]))
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(wide).expand(sequences, -1)[sequence].t()
        own = own - slopes[..., None] * (place - places(call)[1][:, None]).abs()
    # Each query's own keys are its sequence's; what others have no interval lets it see.
    spread = own.new_zeros((own.shape[0], len(call.q), sequences, len(place)))
    index = sequence[None, :, None, None].expand(own.shape[0], -1, 1, len(place))
    return spread.scatter(2, index, own.unsqueeze(2)).flatten(2)[None]


def _rows_of(cache: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of all sequences one behind the other, `[1, Hkv, S * keys, D]`."""
    bits = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    found = bits[table.long().clamp(0, len(cache) - 1)].view(cache.dtype).to(dtype)
    return found.flatten(0, 2).transpose(0, 1)[None]


def _by_scores(call: Call, rows: Tensor, k: Tensor, v: Tensor, place: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, wide, and the log-sum-exp of `[S, Hkv, groups, D]` rows."""
    wide, kv_heads = wide_dtype(rows.dtype), k.shape[1]

    def of_heads(tensor: Tensor) -> Tensor:  # [..., Hq] or [Hq] as [S or 1, Hkv, groups, 1]
        return tensor.to(wide).view(-1, kv_heads, rows.shape[2], 1)

    scores = (rows.to(wide) * scale_of(call)) @ k.to(wide).mT
    if call.k_scale is not None:
        scores = scores * call.k_scale.to(wide)[:, None, None]
    scores = call.softcap * (scores / call.softcap).tanh() if call.softcap else scores
    if call.alibi_slopes is not None:
        distance = (place - (call.lengths.long() - 1)[:, None]).abs()[:, None, None]
        scores = scores - of_heads(call.alibi_slopes) * distance
    if call.bias is not None:
        known = call.bias.to(wide)[..., : len(place)]  # no sequence has keys past those that it is for
        known = F.pad(known, (0, len(place) - known.shape[2])).transpose(0, 1)
        scores = scores + (known.unflatten(1, (kv_heads, -1)) if known.shape[1] > 1 else known.unsqueeze(1))
    scores = scores.masked_fill(~allowed[:, None, None], -math.inf)
    largest, sinks = scores.amax(-1, keepdim=True), None
    if call.sinks is not None:
        sinks = of_heads(call.sinks)
        largest = torch.maximum(largest, sinks)
    largest = largest.clamp(min=torch.finfo(wide).min)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks - largest).exp()
    dead = total == 0
    total = total.masked_fill(dead, 1)
    out = (weights / total) @ v.to(wide)
    if call.v_scale is not None:
        out = out * call.v_scale.to(wide)[:, None, None]
    return out, (largest + total.log()).masked_fill(dead, -math.inf).squeeze(-1)


def _of_pages(cache: Tensor, table: Tensor, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of each sequence, `[S, Hkv, keys, D]`, zero where its query sees none."""
    bits = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    found = bits[table.long().clamp(0, len(cache) - 1)].view(cache.dtype).to(dtype).flatten(1, 2)
    return found.masked_fill(~allowed[..., None, None], 0).transpose(1, 2)


def update(call: Call) -> None:
    """Write rows into their slots; one that is left out writes what another does, for which no row must be counted."""
    slots, size = call.slots, call.k_cache.shape[1]
    if not (slots.numel() and call.k_cache.numel()):
        return
    kept = slots >= 0
    row = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.to(torch.uint8).argmax())
    # Where none is kept, the first slot gets what it has.
    first, some = slots[row].clamp(min=0), kept.any()
    page, place = first // size, first % size
    for cache, rows, scale in ((call.k_cache, call.k, call.k_scale), (call.v_cache, call.v, call.v_scale)):
        bits = cache.view(torch.uint8) if cache.dtype in FP8 else cache
        made = stored(rows, scale, cache.dtype).view(bits.dtype)[row]
        bits.index_put_((page, place), torch.where(some, made, bits[page, place]))
