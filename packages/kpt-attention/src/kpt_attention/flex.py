"""`flex_attention` for functions of scores, as torch's FlexAttention takes them, with a gradient on every device."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError

from .dense import wide_dtype
from .functional import attention
from .mask_algebra import Mask
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
        q: `[B, Hq, Q, D]`; a query's index counts from `K - Q`, so that the last stands at the last key, but from 0 in
            `score_mod`, as in torch.
        k: `[B, Hkv, K, D]`.
        v: `[B, Hkv, K, Dv]`.
        score_mod: takes scores and int64 indices that broadcast to `[B, Hq, queries, K]`, where torch's takes numbers.
            Gradients reach tensors that it reads. None for scores as they are, by op `attention.dense`.
        mask: a `Mask`, a `Plan`, a `mask_mod(b, h, q, k)`, or torch's `BlockMask`, which has one; all keys if None.
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
    if not isinstance(mask, Mask | Plan | None):
        function = getattr(mask, "mask_mod", mask)
        if not callable(function):
            raise InputError(
                f"flex_attention: mask must be a Mask, a Plan, a BlockMask or a function of (b, h, q, k); got "
                f"{type(mask).__name__}"
            )
        mask = predicate(function, per_batch=True, per_head=True)
    if score_mod is None:
        return attention(q, k, v, mask, scale=scale, return_lse=return_lse)
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[1] % max(k.shape[1], 1) or k.shape[:3] != v.shape[:3]:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise InputError(
            f"flex_attention: q, k and v must be [batch, heads, tokens, head_dim], heads of k dividing those of q; got "
            f"{shapes}"
        )
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(mask, Plan):
        mask = mask.fitted(queries, keys, q.shape[0], q.shape[1])
    else:
        first = keys - queries
        mask = Plan(position=first) if mask is None else mask.plan(
            queries, keys, batch=q.shape[0], heads=q.shape[1], offset=first, device=q.device
        )  # fmt: skip
    parts = []
    for begin in range(0, max(queries, 1), BLOCK):
        rows = range(begin, min(begin + BLOCK, queries))
        parts.append(checkpoint(_rows, q, k, v, score_mod, mask, rows, scale, use_reentrant=False))
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return (out, lse) if return_lse else out


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
    changed = score_mod(scores, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), (i + rows.start).view(-1, 1), j)
    if changed.shape != scores.shape:
        raise InputError(
            f"flex_attention: score_mod must give {list(scores.shape)}, as the scores it takes; got "
            f"{list(changed.shape)}: its indices are tensors that broadcast"
        )
    scores = changed.to(wide).masked_fill(~allowed, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(dead, 0).logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    return (weights.to(q.dtype) @ v), lse.masked_fill(dead, -math.inf).squeeze(-1)
