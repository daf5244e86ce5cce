"""`attention.paged` for steps of decoding, one query a sequence, and the calls that it refuses."""

import torch
from torch import Tensor

from kpt_backend_tpu.attention.dense import MOST_DIMS, MOST_TILES
from kpt_backend_tpu.bridge import call as jax
from kpt_backend_tpu.layouts import Scores
from kpt_core import Call, Refusal

#: Bytes of a page in float32, of which a core's VMEM holds several: two of each cache, and what is computed of them.
MOST_BYTES = 1 << 20


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    if call.cu_seqlens_q is not None:
        return "cu_seqlens_q is given; this kernel is for one query of each sequence"
    for name in ("alibi_slopes", "bias", "mask"):
        if getattr(call, name) is not None:
            return Refusal("{name} is given; this kernel reads spans of keys and adds nothing to scores", name=name)
    if call.first:
        return Refusal("the first {first} keys beside a window; this kernel reads one span of keys", first=call.first)
    if call.k_cache.dtype not in (call.q.dtype, torch.float8_e4m3fn, torch.float8_e5m2):
        return Refusal("caches in {dtype}; torch_xla holds float8_e4m3fn and float8_e5m2", dtype=call.k_cache.dtype)
    if 0 in (*call.q.shape, *call.k_cache.shape, *call.v_cache.shape, *call.block_table.shape):
        return "tensors without elements; needs some"
    (_, size, heads, dim), value_dim = call.k_cache.shape, call.v_cache.shape[3]
    if max(dim, value_dim) > MOST_DIMS:
        return Refusal("head_dim is {dim}; this kernel is for {most} at most", dim=max(dim, value_dim), most=MOST_DIMS)
    page = size * heads * max(dim, value_dim) * 4
    if page > MOST_BYTES:
        return Refusal("pages of {page} bytes in float32; {most} fit at most", page=page, most=MOST_BYTES)
    if call.block_table.numel() > MOST_TILES:
        told = "a block table of {entries} pages; the {most} that a core's SMEM holds are the most"
        return Refusal(told, entries=call.block_table.numel(), most=MOST_TILES)
    return None


def forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp."""
    vectors = (None if each is None else each.float() for each in (call.sinks, call.k_scale, call.v_scale))
    scale = call.q.shape[2] ** -0.5 if call.scale is None else float(call.scale)
    given = (call.q, call.k_cache, call.v_cache, call.block_table, call.lengths, *vectors)
    out, lse = jax("paged:decode", *given, window=call.window, scores=Scores(True, scale, float(call.softcap)))
    return out, lse if call.return_lse else None
