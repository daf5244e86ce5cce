"""`attention`: the op, with a mask as a value."""

from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError

from .arguments import check_tensor, integer, number
from .dense import dense
from .mask_algebra import Mask
from .plan import Plan


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Plan | None = None,
    *,
    position: int | None = None,
    return_lse: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    offset: int = 0,
) -> Any:  # a tensor or two: callers would have to tell a type checker which
    """Attend under a mask; what the arguments mean is said at `kpt_attention.dense.dense`.

    Args:
        q: `[B, Hq, Q, D]`.
        k: `[B, Hkv, K, D]`.
        v: `[B, Hkv, K, Dv]`.
        mask: which keys a query may see, all if None. A `Mask` is lowered in each call: where many calls share one, as
            the layers of a model do, lower it once (`mask.plan(...)`) and give the plan.
        position: place of the first query among the keys, for a `Mask` and for biases by distance; `K - Q` if None, so
            that the last query stands at the last key. A `Plan` has its own.
        return_lse: whether to return the log-sum-exp `[B, Hq, Q]`, too.
        scale: of the scores, `1 / sqrt(D)` if None.
        softcap: cap of the scores, 0 for none.
        bias: added to the scores, broadcasts to `[B, Hq, Q, K]`.
        alibi_slopes: `[Hq]`.
        relative_bias: `[Hq, 2 R + 1]`.
        sinks: `[Hq]`.
        dropout: rate.
        seed: of dropout, which needs one: `int(torch.randint(1 << 62, ()))` draws one; in compiled code an int64 tensor
            `[]`.
        offset: of dropout.

    Returns:
        The output `[B, Hq, Q, Dv]`; with `return_lse` the log-sum-exp beside it.

    Raises:
        InputError: the mask is for other sizes, or an argument does not fit.

    Examples:
        >>> import torch
        >>> from kpt_attention import attention, causal, document
        >>> q, k, v = torch.randn(3, 1, 8, 12, 64)
        >>> packed = causal() & document(cu_seqlens=torch.tensor([0, 5, 12]))
        >>> attention(q, k, v, packed).shape
        torch.Size([1, 8, 12, 64])
    """
    # A step of decoding takes microseconds: what is usual is asked for first, and texts are written for errors.
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor("attention", name, value)
    if not (bias is None and alibi_slopes is None and relative_bias is None and sinks is None):
        optional = {"bias": bias, "alibi_slopes": alibi_slopes, "relative_bias": relative_bias, "sinks": sinks}
        for name, given in optional.items():
            if given is not None:
                check_tensor("attention", name, given)
    if softcap or type(softcap) is not float:
        softcap = number("attention", "softcap", softcap)
    if dropout or type(dropout) is not float:
        dropout = number("attention", "dropout", dropout)
    if type(offset) is not int:
        offset = integer("attention", "offset", offset)
    scale = None if scale is None else number("attention", "scale", scale)
    position = None if position is None else integer("attention", "position", position)
    seeds = _seeds(dropout, seed)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(
            f"attention: q, k and v must be [batch, heads, tokens, head_dim]; got {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(mask, Plan):
        plan = mask.fitted(queries, keys, q.shape[0], q.shape[1])
        if position is not None and position != plan.position:
            raise InputError(f"attention: position={position}, but the plan was made for {plan.position}: leave it out")
    else:
        first = keys - queries if position is None else position
        if mask is None:
            plan = Plan(position=first)
        elif isinstance(mask, Mask):
            plan = mask.plan(queries, keys, batch=q.shape[0], heads=q.shape[1], offset=first, device=q.device)
        else:
            raise InputError(
                f"attention: mask must be a Mask or a Plan; got {type(mask).__name__}: kpt_attention.dense_mask(t) "
                "makes one of a bool tensor, and a float tensor is the argument bias"
            )
    out, lse = dense(
        q, k, v, plan.intervals, plan.blocks, plan.block_bits, bias, alibi_slopes, relative_bias, sinks,
        causal=plan.causal, position=plan.position, return_lse=return_lse, scale=scale, softcap=softcap,
        dropout=dropout, offset=offset, **seeds,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def _seeds(dropout: float, seed: int | Tensor | None) -> dict[str, Any]:
    """Return the seed as the op takes it: a number, or a tensor that was drawn."""
    if seed is None:
        if dropout:
            raise InputError(
                f"attention: dropout={dropout} needs a seed, or each call drops the same; give one, for instance "
                "seed=int(torch.randint(1 << 62, ()))"
            )
        return {}
    if not isinstance(seed, Tensor):
        return {"seed": integer("attention", "seed", seed)}
    if seed.dtype is not torch.int64 or seed.dim():
        raise InputError(
            f"attention: seed must be an integer or an int64 tensor []; got {seed.dtype} {list(seed.shape)}"
        )
    return {"drawn_seed": seed} if dropout else {}
