"""`attention.paged` natively: keys and values are read once, where they lie; long prefills go to `attention.dense`."""

import torch
from torch import Tensor

from kpt_backend_cpu.attention import dense
from kpt_backend_cpu.attention.few import run
from kpt_core import Call, Refusal, get_op

NAME = "attention.paged"
#: Where a sequence has more queries, bringing its pages together costs less than reading them for a few at a time.
_MOST_QUERIES = 15


def unsupported(call: Call) -> Refusal | None:
    """Return why a call is not for the kernel, or None."""
    for name in ("alibi_slopes", "bias", "mask"):
        if getattr(call, name) is not None:
            return Refusal("{name} is given; this kernel reads spans of keys and adds nothing to scores", name=name)
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
        ends, position = torch.arange(len(q) + 1, dtype=torch.int32), lengths - 1
    else:
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
        run(NAME, call, out, lse, ends, own, call.block_table)
    for number, some in parts:
        _together(call, some, spans[some], call.block_table[number], out, lse)
    return out, lse


def _together(call: Call, rows: slice, spans: Tensor, table: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Attend with many queries of one sequence, to its pages brought together, as `attention.dense` does."""
    size, groups = call.k_cache.shape[1], call.q.shape[1] // call.k_cache.shape[2]
    live = spans[spans[:, 0] < spans[:, 1]]
    begin, end = (int(live[:, 0].min()) // size, -(-int(live[:, 1].max()) // size)) if len(live) else (0, 0)
    q = call.q[rows]
    if call.k_scale is not None:
        q = q * call.k_scale.repeat_interleave(groups)[:, None]
    pages = table[begin:end].long()
    k, v = (
        (cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages])
        .flatten(0, 1).to(q.dtype).transpose(0, 1)[None]
        for cache in (call.k_cache, call.v_cache)
    )  # fmt: skip
    intervals = (spans - begin * size).clamp_(min=0)[None, None, :, None]
    bound = get_op("attention.dense").bind(
        q.transpose(0, 1)[None], k, v, intervals, sinks=call.sinks, return_lse=lse is not None, scale=call.scale,
        softcap=call.softcap,
    )  # fmt: skip
    (found, sums), _ = dense.forward(bound)
    found = found[0].transpose(0, 1)
    if call.v_scale is not None:
        found = found * call.v_scale.repeat_interleave(groups)[:, None]
    out[rows] = found
    if lse is not None and sums is not None:
        lse[rows] = sums[0].transpose(0, 1)
