"""Op `attention.dense`: softmax attention under any mask, with what changes its scores, and its log-sum-exp."""

import math

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from .dropout import kept, seed_of
from .plan import BLOCK, allowed_keys

#: What queries, keys and values may be.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAME = "attention.dense"
_TENSORS = ("k", "v", "intervals", "blocks", "block_bits", "bias", "alibi_slopes", "relative_bias", "sinks",
            "drawn_seed")  # fmt: skip


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what softmax is computed in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def scale_of(call: Call) -> float:
    """Return what products of queries and keys are multiplied by."""
    return float(call.scale) if call.scale is not None else 1 / math.sqrt(max(call.q.shape[3], 1))


def _check(call: Call) -> None:
    # In the order of what is cheap to ask: a step of decoding takes microseconds, and texts are written for errors.
    q, k, v = call.q, call.k, call.v
    q_shape, k_shape, v_shape, dtype = q.shape, k.shape, v.shape, q.dtype
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise InputError(f"{_NAME}: q, k and v must be [batch, heads, tokens, head_dim]; got {_shapes(call)}")
    if dtype not in DTYPES or not dtype == k.dtype == v.dtype:
        raise InputError(
            f"{_NAME}: q, k and v must have one dtype of float32, bfloat16, float16 and float64; got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    (batch, heads, _, dim), (kv_batch, kv_heads, keys, k_dim) = q_shape, k_shape
    if not batch == kv_batch == v_shape[0] or kv_heads != v_shape[1] or keys != v_shape[2]:
        raise InputError(
            f"{_NAME}: q, k and v must have one batch size, k and v as many heads and tokens; got {_shapes(call)}"
        )
    if dim != k_dim or dim == 0:
        raise InputError(f"{_NAME}: q and k must have one head_dim of at least 1; got {_shapes(call)}")
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"{_NAME}: heads of k and v ({kv_heads}) must divide those of q ({heads})")
    _check_mask(call)
    _check_modifiers(call)
    device = q.device
    others = (k, v, call.intervals, call.blocks, call.block_bits, call.bias, call.alibi_slopes, call.relative_bias,
              call.sinks, call.drawn_seed)  # fmt: skip
    for name, value in zip(_TENSORS, others, strict=True):
        if value is not None and value.device != device:
            raise InputError(
                f"{_NAME}: all tensors must be on one device; got q on {device} and {name} on {value.device}"
            )


def _shapes(call: Call) -> str:
    return f"q {list(call.q.shape)}, k {list(call.k.shape)}, v {list(call.v.shape)}"


def _fits(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(have in (1, want) for have, want in zip(shape, wanted, strict=True))


def _check_mask(call: Call) -> None:
    intervals, blocks, bits = call.intervals, call.blocks, call.block_bits
    if intervals is None and blocks is None and bits is None:
        return
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    if intervals is not None and (
        intervals.dtype is not torch.int32
        or intervals.dim() != 5
        or not _fits(intervals.shape[:2], (batch, heads))
        or intervals.shape[2] != queries
        or intervals.shape[4] != 2
    ):
        raise InputError(
            f"{_NAME}: intervals must be int32 [{batch} or 1, {heads} or 1, {queries}, n, 2]; got {intervals.dtype} "
            f"{list(intervals.shape)}"
        )
    if (blocks is None) != (bits is None):
        raise InputError(f"{_NAME}: blocks and block_bits belong together; give both or none (Mask.plan makes them)")
    if blocks is not None and (
        blocks.dtype is not torch.int32
        or blocks.dim() != 4
        or not _fits(blocks.shape[:2], (batch, heads))
        or blocks.shape[2] < -(-queries // BLOCK)
        or blocks.shape[3] < -(-keys // BLOCK)
    ):
        raise InputError(
            f"{_NAME}: blocks must be int32 [{batch} or 1, {heads} or 1, {-(-queries // BLOCK)}, {-(-keys // BLOCK)}], "
            f"or more, blocks of {BLOCK} by {BLOCK}; got {blocks.dtype} {list(blocks.shape)}"
        )
    if bits is not None and (bits.dtype is not torch.uint8 or tuple(bits.shape[1:]) != (BLOCK, BLOCK // 8)):
        raise InputError(
            f"{_NAME}: block_bits must be uint8 [n, {BLOCK}, {BLOCK // 8}]; got {bits.dtype} {list(bits.shape)}"
        )


def _check_modifiers(call: Call) -> None:
    batch, heads, queries, _ = call.q.shape
    if call.bias is not None and (
        not call.bias.is_floating_point() or not _fits(call.bias.shape, (batch, heads, queries, call.k.shape[2]))
    ):
        raise InputError(
            f"{_NAME}: bias must be floating and broadcast to [{batch}, {heads}, {queries}, {call.k.shape[2]}]; got "
            f"{call.bias.dtype} {list(call.bias.shape)}: a bool mask is kpt_attention.dense_mask(mask)"
        )
    for name in ("alibi_slopes", "sinks"):
        value = getattr(call, name)
        if value is not None and (tuple(value.shape) != (heads,) or not value.is_floating_point()):
            raise InputError(f"{_NAME}: {name} must be floating [{heads}]; got {value.dtype} {list(value.shape)}")
    table = call.relative_bias
    if table is not None and (
        table.dim() != 2 or table.shape[0] != heads or table.shape[1] % 2 == 0 or not table.is_floating_point()
    ):
        raise InputError(
            f"{_NAME}: relative_bias must be floating [{heads}, 2 R + 1], of distances -R to R; got {table.dtype} "
            f"{list(table.shape)}"
        )
    if not 0 <= call.dropout < 1:
        raise InputError(f"{_NAME}: dropout must be in [0, 1); got {call.dropout}")
    if not 0 <= call.softcap < math.inf:
        raise InputError(f"{_NAME}: softcap must be positive, or 0 for none; got {call.softcap}")
    if call.scale is not None and not -math.inf < call.scale < math.inf:
        raise InputError(f"{_NAME}: scale must be finite, or None for 1 / sqrt(head_dim); got {call.scale}")
    for name in ("position", "seed", "offset"):
        value = getattr(call, name)
        if not isinstance(value, (int, torch.SymInt)):
            raise InputError(f"{_NAME}: {name} must be an int; got {value!r}: int(...) makes one of a whole number")
    drawn = call.drawn_seed
    if drawn is not None and (drawn.dtype is not torch.int64 or drawn.dim()):
        raise InputError(f"{_NAME}: drawn_seed must be int64 []; got {drawn.dtype} {list(drawn.shape)}")


def _fake(call: Call) -> tuple[Tensor, Tensor | None]:
    q = call.q
    out = q.new_empty((*q.shape[:3], call.v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype)) if call.return_lse else None


def _saves(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the largest score of each row, and the sum of the exponentials less that.

    Their log-sum-exp alone would do, but for scores in the thousands its rounding is a per cent of a probability.
    """
    out, largest, total, _ = _attend(call)
    return out, largest.squeeze(-1), total.squeeze(-1)


def _fake_saves(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    rows = (call.q.new_empty(call.q.shape[:3], dtype=wide_dtype(call.q.dtype)) for _ in range(2))
    return call.q.new_empty((*call.q.shape[:3], call.v.shape[3])), *rows


def _flops(call: Call) -> int:
    batch, heads, queries, head_dim = call.q.shape
    return int(2 * batch * heads * queries * call.k.shape[2] * (head_dim + call.v.shape[3]))


def _plain_bytes(call: Call) -> int:
    """Scores, their exponentials and the weights, all at once."""
    batch, heads, queries, _ = call.q.shape
    size: int = 3 * batch * heads * queries * call.k.shape[2] * wide_dtype(call.q.dtype).itemsize
    return size


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Sequences times heads, queries and keys, rounded since they vary; dims and the kind of mask."""
    batch, heads, queries, head_dim = call.q.shape
    mask = "intervals" if call.intervals is not None else "blocks" if call.blocks is not None else "none"
    mask = "causal" if call.causal and mask == "none" else mask
    sizes = map(next_power_of_two, (batch * heads, queries, call.k.shape[2]))
    return (*sizes, heads // call.k.shape[1], head_dim, call.v.shape[3], mask)


def biases(call: Call, scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return scores, already scaled and capped, with what is added to them but for `bias`.

    Args:
        call: the call.
        scores: `[B, Hq, rows, columns]`.
        rows: positions of the queries.
        columns: keys.
    """
    distance = columns - rows[:, None]
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    if call.relative_bias is not None:
        far = call.relative_bias.shape[1] // 2
        scores = scores + call.relative_bias.to(scores.dtype)[:, distance.clamp(-far, far) + far]
    return scores


@op(_NAME, check=_check, fake=_fake, saves=_saves, fake_saves=_fake_saves, optional_results={1: "return_lse"},
    random=True, flops=_flops, plain_bytes=_plain_bytes, size_key=_size_key, autocast=("q", "k", "v"))  # fmt: skip
def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None = None,
    blocks: Tensor | None = None,
    block_bits: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    return_lse: bool = True,
    causal: bool = False,
    position: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    drawn_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend: each query's mean of the values of the keys that it may see, weighed by the softmax of its scores.

    A score is `scale * q @ k`, capped, with biases added. Softmax is computed in float32 at least. A query that may see
    no key gets zeros, a log-sum-exp of -inf (of its sink, where there is one) and zero gradients. A key that no query
    may see has no influence, NaN and inf in it neither; those in a key that some queries see may reach the others.

    Args:
        q: `[B, Hq, Q, D]` float32, bfloat16, float16 or float64.
        k: `[B, Hkv, K, D]`; `Hkv` divides `Hq`, and query head `h` reads head `h // (Hq // Hkv)`.
        v: `[B, Hkv, K, Dv]`.
        intervals: keys that each query may see, see `kpt_attention.Plan`. All masks that are given must allow a key.
        blocks: blocks of them, likewise; what lies beyond the queries and keys is not looked at.
        block_bits: bits of blocks that are partly live, likewise.
        bias: broadcasts to `[B, Hq, Q, K]`, added to the scores.
        alibi_slopes: `[Hq]`: so much is subtracted for each step between query and key (arXiv:2108.12409).
        relative_bias: `[Hq, 2 R + 1]`: added by `key - query position`, from -R to R, beyond which the ends hold.
        sinks: `[Hq]`: the score of one more key, which has no value (arXiv:2309.17453, as gpt-oss learns it).
        return_lse: whether to return the log-sum-exp.
        causal: query `i` may see the keys up to `i + position`.
        position: place of the first query among the keys.
        scale: `1 / sqrt(D)` if None.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        dropout: the rate at which probabilities are dropped; the others are divided by `1 - dropout`.
        seed: of dropout.
        offset: of dropout: another one draws other numbers.
        drawn_seed: `[]` int64, added to `seed`: a compiled graph can draw it, where a number would be a constant of it.

    Returns:
        The output `[B, Hq, Q, Dv]` in q's dtype; and the log-sum-exp of the scores, sink included, `[B, Hq, Q]` float32
        (float64 for float64), None where nobody asked. Both are differentiable in q, k, v, bias, alibi_slopes,
        relative_bias and sinks.

    Raises:
        InputError: a shape, dtype, device or number does not fit.

    Source: arXiv:1706.03762; the log-sum-exp as in FlashAttention-2 (arXiv:2307.08691).
    """
    call = dense.bind(
        q, k, v, intervals, blocks, block_bits, bias, alibi_slopes, relative_bias, sinks, return_lse=return_lse,
        causal=causal, position=position, scale=scale, softcap=softcap, dropout=dropout, seed=seed, offset=offset,
        drawn_seed=drawn_seed,
    )  # fmt: skip
    out, largest, total, dead = _attend(call)
    lse = (largest + total.log()).masked_fill(dead, -math.inf).squeeze(-1)
    return out, lse if return_lse else None


def _attend(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output; and of each row the largest score, the sum of exponentials (1 for none), if it is dead."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    (batch, heads, queries, _), keys, wide = q.shape, k.shape[2], wide_dtype(q.dtype)
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    allowed = allowed_keys(call, range(queries), range(keys), q.device)
    if allowed is None:
        allowed = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=q.device)
    hidden = ~allowed.any(-2).unsqueeze(-1)
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    q = q.masked_fill(~allowed.any(-1).unsqueeze(-1), 0)
    scores = (q.to(wide) * scale_of(call)) @ k.to(wide).mT
    scores = scores if call.softcap == 0 else call.softcap * (scores / call.softcap).tanh()
    rows, columns = (torch.arange(size, device=q.device) for size in (queries, keys))
    scores = biases(call, scores, rows + call.position, columns)
    scores = scores if call.bias is None else scores + call.bias.to(wide)
    scores = scores.masked_fill(~allowed, -math.inf)
    # One more column: the sink, or nothing, so that no row is empty.
    column = q.new_full((), -math.inf, dtype=wide) if sinks is None else sinks.to(wide)[:, None, None]
    scores = torch.cat((scores, column.expand(batch, heads, queries, 1)), -1)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    dead = total == 0
    total = total.masked_fill(dead, 1)
    weights = (exponentials / total)[..., :-1]
    if call.dropout > 0:
        each = torch.arange(batch * heads * queries, device=q.device).view(batch, heads, queries, 1)
        weights = weights * kept(call.dropout, seed_of(call), call.offset, each, columns) / (1 - call.dropout)
    return weights.to(q.dtype) @ v, largest, total, dead
