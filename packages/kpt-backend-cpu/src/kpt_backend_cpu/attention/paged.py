"""`attention.paged` natively: keys and values are read once, where they lie; long prefills go to `attention.dense`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kpt_backend_cpu.attention import dense
from kpt_backend_cpu.attention.few import run
from kpt_core import Call, Refusal, get_op

NAME = "attention.paged"
#: Where a sequence has more queries, bringing its pages together costs less than reading them for a few at a time.
_MOST_QUERIES = 15


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    if call.mask is not None:
        return "a mask; this kernel reads spans of keys"
    if call.first:
        return Refusal("the first {first} keys beside a window; this kernel reads one span of keys", first=call.first)
    return None


def forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp. Products and sums are of float32, whatever the caches are of."""
    q, lengths = call.q, call.lengths
    out = q.new_empty((*q.shape[:2], call.v_cache.shape[3]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if call.return_lse else None
    if out.numel() == 0:
        return out, lse
    ends = call.cu_seqlens_q
    if ends is None:
        # A step of decoding takes microseconds: nothing is made that the kernel does without.
        begin = (lengths - call.window).clamp_(min=0) if call.window else torch.zeros_like(lengths)
        run(NAME, call, out, lse, None, torch.stack((begin, lengths), 1), call.block_table)
        return out, lse
    ends = ends.contiguous()
    rows = torch.arange(len(q), dtype=torch.int32)
    sequence = torch.searchsorted(ends, rows, right=True) - 1
    lengths = lengths[sequence]
    position = lengths - ends[sequence + 1] + rows
    past = position + 1 if call.causal else lengths
    first = (position + 1 - call.window).clamp_(min=0) if call.window else torch.zeros_like(past)
    spans = torch.stack((first, past), 1)
    many: list[int] = []
    if len(q) > _MOST_QUERIES and max(q.shape[2], out.shape[2]) <= dense.MOST_DIM:
        many = (ends.diff() > _MOST_QUERIES).nonzero().flatten().tolist()
    parts = [(number, slice(int(ends[number]), int(ends[number + 1]))) for number in many]
    own = spans.clone() if parts else spans
    for _, some in parts:
        own[some] = 0
    if len(parts) < len(ends) - 1:
        run(NAME, call, out, lse, ends, own, call.block_table, position)
    for number, some in parts:
        _together(call, number, some, spans[some], int(position[some.start]), out, lse)
    return out, lse


def _together(call: Call, number: int, rows: slice, spans: Tensor, first: int, out: Tensor, lse: Tensor | None) -> None:
    """Attend with many queries of a sequence, from place `first` on, to its pages brought together, as the dense op."""
    size, groups = call.k_cache.shape[1], call.q.shape[1] // call.k_cache.shape[2]
    live = spans[spans[:, 0] < spans[:, 1]]
    begin, end = (int(live[:, 0].min()) // size, -(-int(live[:, 1].max()) // size)) if len(live) else (0, 0)
    q = call.q[rows]
    if call.k_scale is not None:
        q = q * call.k_scale.repeat_interleave(groups)[:, None]
    pages = call.block_table[number, begin:end].long()
    k, v = (
        (cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages])
        .flatten(0, 1).to(q.dtype).transpose(0, 1)[None]
        for cache in (call.k_cache, call.v_cache)
    )  # fmt: skip
    intervals = (spans - begin * size).clamp_(min=0)[None, None, :, None]
    slopes, bias = call.alibi_slopes, call.bias
    if bias is not None:
        bias = (bias if bias.shape[1] == 1 else bias[:, rows])[None, ..., begin * size : end * size]
        bias = F.pad(bias, (0, k.shape[2] - bias.shape[3]))
    bound = get_op("attention.dense").bind(
        q.transpose(0, 1)[None], k, v, intervals, bias=bias, sinks=call.sinks, return_lse=lse is not None,
        alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[number], position=first - begin * size,
        scale=call.scale, softcap=call.softcap,
    )  # fmt: skip
    (found, sums), _ = dense.forward(bound)
    found = found[0].transpose(0, 1)
    if call.v_scale is not None:
        found = found * call.v_scale.repeat_interleave(groups)[:, None]
    out[rows] = found
    if lse is not None and sums is not None:
        lse[rows] = sums[0].transpose(0, 1)
