"""`flex_attention` for functions of scores, as torch's FlexAttention takes them, with a gradient on every device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError

from .arguments import check_tensor, number
from .dense import wide_dtype
from .functional import attention
from .mask_algebra import Extent, Mask
from .masks import predicate
from .plan import BLOCK, Plan, allowed_keys

#: `score_mod(score, b, h, q, k)`: the score, and the indices of its sequence, head, query and key.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:  # a tensor or two, as `attention`
    """Attend with scores that a function changes and a mask that a function says.

    What `attention` can be told (softcap, slopes, biases, sinks) it computes faster than a function: that one is called
    for all keys of 128 queries at a time, and again for the gradient, so that memory stays linear in the queries.

    Args:
        q: `[B, Hq, Q, D]`. Functions count queries from 0, as in torch: `score_mod`, and a `mask_mod` or `BlockMask`. A
            `Mask` counts from `K - Q`, so that the last query stands at the last key.
        k: `[B, Hkv, K, D]`.
        v: `[B, Hkv, K, Dv]`.
        score_mod: takes scores and int64 indices that broadcast to `[B, Hq, queries, K]`, where torch's takes numbers.
            Gradients reach tensors that it reads. None for scores as they are, by op `attention.dense`.
        mask: a `Mask`, a `Plan`, a `mask_mod(b, h, q, k)`, or torch's `BlockMask` of these lengths: its full blocks,
            and of its partial ones what its `mask_mod` allows. All keys if None.
        scale: of the scores before `score_mod`, `1 / sqrt(D)` if None.
        return_lse: whether to return the log-sum-exp `[B, Hq, Q]`, too.

    Returns:
        The output `[B, Hq, Q, Dv]`; with `return_lse` the log-sum-exp beside it.

    Raises:
        InputError: shapes do not fit, the mask is of another kind, or `score_mod` gives another shape.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 4, 16, 8)
        >>> slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        >>> out = flex_attention(q, k, v, lambda s, b, h, i, j: s - slope[h] * (i - j).abs(), lambda b, h, i, j: i >= j)
        >>> out.shape
        torch.Size([1, 4, 16, 8])
    """
    _check(q, k, v, score_mod)
    scale = None if scale is None else number("flex_attention", "scale", scale)
    queries, keys = q.shape[2], k.shape[2]
    first = keys - queries
    if not isinstance(mask, Mask | Plan | None):
        mask, first = _of_torch(mask), 0
    if isinstance(mask, Plan):
        mask = mask.fitted(queries, keys, q.shape[0], q.shape[1])
    elif mask is None:
        mask = Plan(position=first)
    else:
        mask = mask.plan(queries, keys, batch=q.shape[0], heads=q.shape[1], offset=first, device=q.device)
    if score_mod is None:
        return attention(q, k, v, mask, scale=scale, return_lse=return_lse)
    parts = []
    for begin in range(0, max(queries, 1), BLOCK):
        rows = range(begin, min(begin + BLOCK, queries))
        parts.append(checkpoint(_rows, q, k, v, score_mod, mask, rows, scale, use_reentrant=False))
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, score_mod: object) -> None:
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor("flex_attention", name, value)
    shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise InputError(
            f"flex_attention: q, k and v must be [batch, heads, tokens, head_dim] of one batch, k and v of as many "
            f"heads and tokens; got {shapes}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise InputError(
            f"flex_attention: heads of k must divide those of q, and both have one head_dim of at least 1; got {shapes}"
        )
    for what in ("dtype", "device"):
        told = [getattr(each, what) for each in (q, k, v)]
        if len(set(told)) > 1 or not q.is_floating_point():
            raise InputError(f"flex_attention: q, k and v must have one {what}, of floats; got {told}")
    if not (score_mod is None or callable(score_mod)):
        raise InputError(
            f"flex_attention: score_mod must be a function of (score, b, h, q, k) or None; got {score_mod!r}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks(Mask):
    """Let a query see what a `BlockMask` says: all keys of full blocks, and of partial ones those of its function."""

    partial: Tensor  # [B or 1, H or 1, Q blocks, K blocks] bool, as full
    full: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int] | None  # None for any
    inside: Mask

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = [b, h, q // self.size[0], k // self.size[1]]
        for dim in (0, 1):
            at[dim] = at[dim] if self.full.shape[dim] > 1 else torch.zeros_like(at[dim])
        partial, full = (each.to(extent.device)[tuple(at)] for each in (self.partial, self.full))
        return full | (partial & self.inside.allows(extent, b, h, q, k))

    def spread(self) -> tuple[bool, bool]:
        by_batch, by_head = self.inside.spread()
        return by_batch or self.full.shape[0] > 1, by_head or self.full.shape[1] > 1

    def check(self, extent: Extent) -> None:
        if self.lengths not in (None, (extent.queries, extent.keys)):
            raise InputError(
                f"flex_attention: the BlockMask is for {self.lengths[0]} queries and {self.lengths[1]} keys; got "
                f"{extent.queries} and {extent.keys}: make one of these lengths"
            )
        batch, heads, rows, columns = self.full.shape
        wanted = (-(-extent.queries // self.size[0]), -(-extent.keys // self.size[1]))
        if batch not in (1, extent.batch) or heads not in (1, extent.heads) or (rows, columns) != wanted:
            raise InputError(
                f"flex_attention: the BlockMask has blocks [{batch}, {heads}, {rows}, {columns}]; expected "
                f"[{extent.batch} or 1, {extent.heads} or 1, {wanted[0]}, {wanted[1]}]"
            )


def _of_torch(mask: Any) -> Mask:
    """Return torch's `BlockMask`, or a `mask_mod`, as a mask."""
    if not hasattr(mask, "kv_num_blocks"):
        if not callable(mask):
            raise InputError(
                f"flex_attention: mask must be a Mask, a Plan, a BlockMask or a function of (b, h, q, k); got "
                f"{type(mask).__name__}"
            )
        return predicate(mask)
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise InputError(
            "flex_attention: a sliced BlockMask has lost its mask_mod, as torch has it: set mask_mod to that of the "
            "whole one, with the offset of the slice"
        )
    size = tuple(mask.BLOCK_SIZE)
    lengths = tuple(mask.seq_lengths)
    columns = -(-lengths[1] // size[1])
    partial = _table(mask.kv_num_blocks, mask.kv_indices, columns)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _table(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    partial, full = torch.broadcast_tensors(partial, full)
    # One block past all lengths is how torch says that a mask is of none.
    return _Blocks(partial, full, size, None if min(size) >= 1 << 30 else lengths, predicate(mask.mask_mod))


def _table(number: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return which blocks are listed, `[B or 1, H or 1, Q blocks, columns]` bool."""
    number, indices = number[(None,) * (3 - number.dim())], indices[(None,) * (4 - indices.dim())].long()
    listed = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
    table = torch.zeros((*indices.shape[:3], columns + 1), dtype=torch.bool, device=indices.device)
    # What is not listed, or past the keys, goes into one more column.
    return table.scatter(3, indices.masked_fill(~listed, columns).clamp(max=columns), True)[..., :columns]


def _rows(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod, plan: Plan, rows: range, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of some queries."""
    batch, heads, _, dim = q.shape
    keys, wide = k.shape[2], wide_dtype(q.dtype)
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    allowed = allowed_keys(plan, rows, range(keys), q.device)
    if allowed is None:
        allowed = torch.ones((1, 1, len(rows), keys), dtype=torch.bool, device=q.device)
    hidden = ~allowed.any(-2).unsqueeze(-1)
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    scores = (q[:, :, rows.start : rows.stop].to(wide) * scale) @ k.to(wide).mT
    b, h, i, j = (torch.arange(size, device=q.device) for size in (batch, heads, len(rows), keys))
    changed: object = score_mod(scores, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), (i + rows.start).view(-1, 1), j)
    if not isinstance(changed, Tensor) or changed.shape != scores.shape:
        told = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise InputError(
            f"flex_attention: score_mod must give {list(scores.shape)}, as the scores it takes; got {told}: "
            "its indices are tensors that broadcast"
        )
    scores = changed.to(wide).masked_fill(~allowed, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(dead, 0).logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    return (weights.to(q.dtype) @ v), lse.masked_fill(dead, -math.inf).squeeze(-1)
