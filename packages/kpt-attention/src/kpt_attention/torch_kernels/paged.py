"""`attention.paged` in plain PyTorch: the pages of a sequence are brought together, and `attention.dense` attends."""

from typing import Any

import torch
from torch import Tensor

from kpt_attention.dense import dense, wide_dtype
from kpt_attention.masks import causal as causal_mask
from kpt_attention.masks import sliding_window
from kpt_attention.paged import FP8
from kpt_attention.plan import Plan
from kpt_core import Call


def forward(call: Call) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp."""
    q, wide = call.q, wide_dtype(call.q.dtype)
    out = q.new_zeros((*q.shape[:2], call.v_cache.shape[3]))
    lse = q.new_empty(q.shape[:2], dtype=wide) if call.return_lse else None
    ends = list(range(len(q) + 1)) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for number, length in enumerate(call.lengths.tolist()):
        rows = slice(ends[number], ends[number + 1])
        if rows.start == rows.stop:
            continue
        found, sums = _sequence(call, q[rows], call.block_table[number], length)
        out[rows] = found
        if lse is not None:
            lse[rows] = sums
    return out, lse


def _sequence(call: Call, q: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Attend with the queries of one sequence, `[queries, Hq, D]`."""
    queries, size = len(q), call.k_cache.shape[1]
    first = max(length - queries + 1 - call.window, 0) // size * size if call.window else 0
    pages = table[first // size : -(-length // size)]
    length -= first
    k, v = (_rows(cache, pages, length, q.dtype) for cache in (call.k_cache, call.v_cache))
    position = length - queries
    if call.window and length > call.window:
        plan = (causal_mask() & sliding_window(call.window)).plan(queries, length, offset=position, device=q.device)
    else:
        plan = Plan(causal=call.causal, position=position)
    scaled = q
    if call.k_scale is not None:
        scaled = q.to(wide_dtype(q.dtype)) * call.k_scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]
        scaled, k, v = (each.to(scaled.dtype) for each in (scaled, k, v))
    out, lse = dense(
        scaled.transpose(0, 1)[None], k, v, **plan.arguments(), sinks=call.sinks, return_lse=call.return_lse,
        scale=call.scale, softcap=call.softcap,
    )  # fmt: skip
    out = out[0].transpose(0, 1)
    if call.v_scale is not None:
        out = out.to(wide_dtype(q.dtype)) * call.v_scale.repeat_interleave(q.shape[1] // k.shape[1])[:, None]
    return out.to(q.dtype), None if lse is None else lse[0].transpose(0, 1)


def _rows(cache: Tensor, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values of one sequence, `[1, Hkv, keys, D]`."""
    if cache.dtype in FP8:
        rows = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).to(dtype)
    else:
        rows = cache.index_select(0, pages)
    return rows.flatten(0, 1)[:length].transpose(0, 1)[None]
