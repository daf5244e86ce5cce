"""Packed sequences of different lengths, one after another without padding: a mask, and `attention_varlen`."""

# Methods of masks do what `Mask` says.
# ruff: noqa: D102

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError

from .arguments import check_tensor
from .functional import attention
from .intervals import rows_of
from .mask_algebra import Extent, Mask
from .masks import everything
from .plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Mask):
    """Let a query see keys of its own sequence alone, as `mask` says of the positions within it."""

    query_ends: Tensor
    key_ends: Tensor
    mask: Mask

    def _extents(self, extent: Extent) -> list[Extent]:
        """Return what the mask is lowered for in each sequence: its last query stands at its last key."""
        sizes = zip(self.query_ends.diff().tolist(), self.key_ends.diff().tolist(), strict=True)
        return [Extent(extent.batch, extent.heads, q, k, k - q, extent.device) for q, k in sizes]

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ends, key_ends = self.query_ends.to(extent.device), self.key_ends.to(extent.device)
        row = q - extent.offset
        # What ends where another begins is empty; the last one that begins there has the row.
        of_row = torch.searchsorted(ends, row, right=True) - 1
        of_row = of_row.clamp(0, len(ends) - 2)
        first, past = key_ends[of_row], key_ends[of_row + 1]
        position = row - ends[of_row + 1] + (past - first)
        distinct = set(self._extents(extent))
        own = distinct.pop() if len(distinct) == 1 else extent
        place = (k - first).minimum(past - first - 1).clamp(min=0)  # where it counts
        return (k >= first) & (k < past) & self.mask.allows(own, b, h, position, place)

    def intervals(self, extent: Extent) -> Tensor | None:
        known: dict[Extent, Tensor | None] = {}
        parts: list[Tensor] = []
        for own, first in zip(self._extents(extent), self.key_ends.tolist(), strict=False):
            if own not in known:
                known[own] = self.mask.intervals(own)
            rows = known[own]
            if rows is None:
                return None
            rows = rows.expand(-1, -1, own.queries, -1, -1)
            parts.append(torch.where(rows[..., 1:] > rows[..., :1], rows + first, 0))
        if not parts:
            return rows_of(extent.positions()[..., None])
        batch, heads, most = (max(part.shape[dim] for part in parts) for dim in (0, 1, 3))
        pad = torch.nn.functional.pad
        whole = [pad(part, (0, 0, 0, most - part.shape[3])) for part in parts]
        return torch.cat([part.expand(batch, heads, -1, -1, -1) for part in whole], 2)

    def spread(self) -> tuple[bool, bool]:
        return self.mask.spread()

    def check(self, extent: Extent) -> None:
        ends = int(self.query_ends[-1]), int(self.key_ends[-1])
        if ends != (extent.queries, extent.keys):
            raise InputError(
                f"packed: cu_seqlens end at {ends[0]} queries and {ends[1]} keys; got {extent.queries} and "
                f"{extent.keys}"
            )
        for own in set(self._extents(extent)):
            self.mask.check(own)


def packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, mask: Mask | None = None) -> Mask:
    """Return the mask of packed sequences: a query sees keys of its own sequence, as another mask says within it.

    In each sequence the last query stands at the last key, so of more queries than keys the first see none under
    `causal()`.

    Args:
        cu_seqlens_q: `[sequences + 1]` integers that rise from 0: where each sequence's queries end. Some may be empty.
        cu_seqlens_k: likewise of keys; those of the queries if None.
        mask: of positions within a sequence; everything if None.

    Raises:
        InputError: the ends are not of that form, or not of as many sequences.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor("packed", name, ends)
        whole = ends.dim() == 1 and len(ends) > 0 and not (ends.is_floating_point() or ends.dtype is torch.bool)
        if not whole or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
            raise InputError(f"packed: {name} must be integers that rise from 0; got {ends.tolist()}")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise InputError(
            f"packed: cu_seqlens_q has {len(cu_seqlens_q) - 1} sequences and cu_seqlens_k {len(cu_seqlens_k) - 1}; "
            "each sequence needs both ends, equal to the one before where it is empty"
        )
    if not isinstance(mask, Mask | None):
        raise InputError(f"packed: mask must be a Mask or None; got {type(mask).__name__}")
    return Packed(cu_seqlens_q.long(), cu_seqlens_k.long(), everything() if mask is None else mask)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: Mask | Plan | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:  # a tensor or two, as `attention`
    """Attend within packed sequences of different lengths, without padding, by op `attention.dense`.

    Args:
        q: `[total queries, Hq, D]`.
        k: `[total keys, Hkv, D]`.
        v: `[total keys, Hkv, Dv]`.
        cu_seqlens_q: where each sequence's queries end, as `packed` takes it.
        cu_seqlens_k: likewise of keys; those of the queries if None.
        mask: of positions within a sequence, `causal()` for instance; everything if None. Where many calls share it,
            lower it once, `packed(cu_seqlens_q, cu_seqlens_k, mask).plan(len(q), len(k), ...)`, and give the plan.
        return_lse: whether to return the log-sum-exp `[Hq, total queries]`, too.
        **options: `scale`, `softcap`, `sinks`, `dropout`, `seed`, `offset`, `alibi_slopes` and `relative_bias`, as
            `attention` takes them. The last two need keys that end where queries do.

    Returns:
        The output `[total queries, Hq, Dv]`; with `return_lse` the log-sum-exp beside it. Queries without a key get
        zeros and -inf.

    Raises:
        InputError: a shape, or an end, does not fit.

    Examples:
        >>> import torch
        >>> from kpt_attention import causal
        >>> q, k, v = torch.randn(3, 12, 8, 64)
        >>> attention_varlen(q, k, v, torch.tensor([0, 5, 12]), mask=causal()).shape
        torch.Size([12, 8, 64])
    """
    for name, value in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)):
        check_tensor("attention_varlen", name, value)
    if cu_seqlens_k is not None:
        check_tensor("attention_varlen", "cu_seqlens_k", cu_seqlens_k)
    if not q.dim() == k.dim() == v.dim() == 3:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise InputError(f"attention_varlen: q, k and v must be [tokens, heads, head_dim]; got {shapes}")
    for name in ("alibi_slopes", "relative_bias"):
        other = cu_seqlens_k is not None and not torch.equal(cu_seqlens_q, cu_seqlens_k)
        if options.get(name) is not None and other:
            raise InputError(f"attention_varlen: {name} needs keys that end where queries do; got other cu_seqlens_k")
    if not isinstance(mask, Plan):
        made = packed(cu_seqlens_q, cu_seqlens_k, mask)
        mask = made.plan(len(q), len(k), heads=q.shape[1], offset=0, device=q.device)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    found = attention(q, k, v, mask, return_lse=return_lse, **options)
    out, lse = found if return_lse else (found, None)
    out = out.squeeze(0).transpose(0, 1)
    return out if lse is None else (out, lse.squeeze(0))
