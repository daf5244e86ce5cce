"""Attention of few queries to pages of keys: each key and value is read once, where it lies."""

import math
from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.tensors import DTYPES, address, readable


def run(
    name: str,
    call: Any,
    out: Tensor,
    lse: Tensor | None,
    ends: Tensor | None,
    spans: Tensor,
    table: Tensor,
    places: Tensor | None = None,
) -> None:
    """Run the native kernel.

    Args:
        name: of the op, for errors.
        call: of `attention.paged`.
        out: `[tokens, Hq, Dv]`, written.
        lse: float32 `[tokens, Hq]`, written.
        ends: int32 `[sequences + 1]`: where each sequence's queries end; None for one of each.
        spans: int32 `[tokens, 2]`: keys that each query sees.
        table: int32 `[sequences, pages]`.
        places: int32 `[tokens]`: of each query among its sequence's keys; behind its last key if None.
    """
    q, k, v = (_rows(name, part, getattr(call, part)) for part in ("q", "k_cache", "v_cache"))
    spans, ends = spans.contiguous(), None if ends is None else ends.contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    sinks = None if call.sinks is None else readable(name, "sinks", call.sinks.detach().float(), whole=True)
    slopes = None if call.alibi_slopes is None else readable(name, "slopes", call.alibi_slopes.float(), whole=True)
    bias = None if call.bias is None else call.bias.expand(q.shape[1], len(q), -1).transpose(0, 1)
    if bias is not None:
        bias = _rows(name, "bias", bias.float() if bias.dtype is torch.float64 else bias)
    if places is None and slopes is not None:
        places = spans[:, 1] - 1
    places = None if places is None else places.to(torch.int32).contiguous()
    apart = ends is None
    scales = [None if each is None else readable(name, "a scale", each.detach().float(), whole=True)
              for each in (call.k_scale, call.v_scale)]  # fmt: skip
    native.run(
        "kpt_attention_paged",
        *_heads(q, apart),
        *_heads(out, apart),
        *_pages(k),
        *_pages(v),
        address(lse),
        table.data_ptr(),
        table.stride(0),
        k.shape[1],
        *(address(ends), spans.data_ptr(), address(sinks), *map(address, scales)),
        *((0, 0, 0, 0, DTYPES[torch.float32]) if bias is None else _heads(bias, apart)),
        *(address(slopes), 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1], 0, 0, address(places)),
        *(len(table), 1 if ends is None else 0, q.shape[1], k.shape[2], q.shape[2], v.shape[3], 0),
        float(call.scale) if call.scale is not None else 1 / math.sqrt(q.shape[2]),
        call.softcap,
        False,
        torch.get_num_threads(),
    )


def _rows(name: str, part: str, x: Tensor) -> Tensor:
    """Return `x` with a contiguous last dim; caches, which are large, are never copied for anything else."""
    x = readable(name, part, x)
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def _heads(x: Tensor, apart: bool) -> tuple[int, ...]:
    """Return the numbers of `structures.Heads` of `[tokens, heads, dim]`; `apart`: each token is a sequence's own."""
    return x.data_ptr(), x.stride(0) if apart else 0, x.stride(1), x.stride(0), DTYPES[x.dtype]


def _pages(x: Tensor) -> tuple[int, ...]:
    """Return the numbers of `structures.Pages`."""
    return x.data_ptr(), *x.stride()[:3], DTYPES[x.dtype]
