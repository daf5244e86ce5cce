"""`attention.dense` natively: a running softmax over the blocks of keys that queries see, and its gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.amx import refusal_for_amx
from kpt_backend_cpu.tensors import DTYPES, LOW, address, in_memory, readable
from kpt_core import Call, Refusal

NAME = "attention.dense"

#: Packed rows are as long.
MOST_DIM = 256
_FEW_QUERIES = 16  #: fewer leave most of a tile empty
_BLOCK = 128  #: rows and columns of a mask's block
_BIAS = 3  #: place of the bias behind q, k and v
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: What is added to the scores.
_ADDED = ("bias", "alibi_slopes", "relative_bias")
#: Bytes that the parts of a gradient of what is added may take at a time.
_MOST_PARTS = 1 << 28


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for this kernel, or None."""
    most = max(call.q.shape[3], call.v.shape[3])
    if most > MOST_DIM:
        return Refusal("a dim of {dim}; this kernel takes at most {most}", dim=most, most=MOST_DIM)
    queries, keys = call.q.shape[2], call.k.shape[2]
    left = refusal_for_amx(call.q.dtype)
    if left is not None and not _reads_once(call) and _is_plain(call):
        return left
    if max(queries + abs(call.position), keys) >= 2**31 - 256:
        return Refusal("{keys} keys; this kernel counts them in 32 bits", keys=keys)
    return _refusal_of_added(call)


def _refusal_of_added(call: Call) -> Refusal | str | None:
    """Return why what is added to the scores is not for this kernel, or None."""
    bias, table = call.bias, call.relative_bias
    if not _adds(call):
        return None
    if call.softcap and call.needs:
        return "gradients of capped scores that something is added to; this kernel has one of both"
    if bias is not None and bias.shape[3] < call.k.shape[2]:
        return "a bias that all keys share; this kernel reads one for each"
    parts = _tiles(call) * (0 if table is None else 4 * table.shape[1])
    if "relative_bias" in call.needs and parts > _MOST_PARTS:
        return Refusal("{mib} MiB of parts of the gradient of relative_bias", mib=parts >> 20)
    scores = 4 * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    if "bias" in call.needs and scores > max(_MOST_PARTS, 4 * bias.nbytes):
        return Refusal("the gradient of a bias that heads or queries share takes {mib} MiB first", mib=scores >> 20)
    return None


def _adds(call: Call) -> bool:
    return not (call.bias is None and call.alibi_slopes is None and call.relative_bias is None)


def _tiles(call: Call) -> int:
    """Return how many tiles of queries there are."""
    return call.q.shape[0] * call.q.shape[1] * -(-call.q.shape[2] // _BLOCK)  # type: ignore[no-any-return]


def _reads_once(call: Call) -> bool:
    """Return whether few queries may go to the kernel that reads each key once, as decoding wants."""
    _, heads, queries, _ = call.q.shape
    if queries >= _FEW_QUERIES or call.needs or call.blocks is not None or heads == 0:
        return False
    if call.dropout:
        return False
    intervals = call.intervals
    return intervals is None or (queries == 1 and intervals.shape[1] == 1 and intervals.shape[3] == 1)


def _read_once(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp of few queries: a sequence's keys are one page."""
    q, k, v, scale = _rows("q", call.q), _rows("k", call.k), _rows("v", call.v), call.scale
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out = torch.empty((batch, heads, queries, value_dim), dtype=q.dtype)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32) if call.return_lse else None
    spans = None
    if call.intervals is not None:
        past = min(max(call.position + 1, 0), keys) if call.causal else keys
        begins, ends = call.intervals[:, 0, 0, 0].expand(batch, 2).unbind(1)
        spans = torch.stack((begins.clamp(0, keys), ends.clamp(0, past)), 1)
    numbers = ("sinks", "alibi_slopes", "relative_bias")
    sinks, slopes, table = (_numbers_of(call, name) for name in numbers)
    bias = None if call.bias is None else _bias(call).expand(batch, heads, queries, keys)
    native.run(
        "kpt_attention_paged",
        *_heads(q),
        *_heads(out),
        *_page(k),
        *_page(v),
        *(address(lse), 0, 0, keys, 0, address(spans), address(sinks), 0, 0),
        *(*_heads(bias), address(slopes), 0, address(table), 0 if table is None else table.shape[1] // 2, 0),
        *(batch, queries, heads, kv_heads, dim, value_dim, call.position),
        *(1 / math.sqrt(dim) if scale is None else float(scale), call.softcap),
        *(call.causal, torch.get_num_threads()),
    )
    return out, lse


def prepare(call: Call) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return what computes all steps of decoding that look like this one, or None where `forward` is as quick."""
    q, k, v, bias, make = call.q, call.k, call.v, call.bias, type(call)
    others = (call.intervals, call.alibi_slopes, call.relative_bias, call.sinks)
    if any(x is not None for x in others) or call.dropout or not _reads_once(call):
        return None
    if any(x.stride(3) != 1 or x.numel() == 0 for x in (q, k, v, *(() if bias is None else (bias,)))):
        return None
    if bias is not None and bias.dtype not in _WIDE:
        return None
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    # What `_read_once` hands over, but for the addresses.
    of_q, of_k, of_v = _heads(q)[1:], _page(k)[1:], _page(v)[1:]
    shape, of_lse, return_lse = (batch, heads, queries, value_dim), (batch, heads, queries), call.return_lse
    of_out = (heads * queries * value_dim, queries * value_dim, value_dim, DTYPES[q.dtype])
    none = (0, 0, keys, 0, 0, 0, 0, 0)
    of_bias = _heads(None if bias is None else bias.expand(batch, heads, queries, keys))[1:]
    scale = 1 / math.sqrt(dim) if call.scale is None else float(call.scale)
    rest = (0, 0, 0, 0, 0, batch, queries, heads, kv_heads, dim, value_dim, call.position, scale, call.softcap)
    causal, float32, threads = call.causal, torch.float32, torch.get_num_threads

    tail = (*rest, causal)

    def computed(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        bias, place, keys, values = others[_BIAS], q.data_ptr(), k.data_ptr(), v.data_ptr()
        # As `in_memory` does, whose loop takes a tenth of a short step.
        there = place >= LOW and keys >= LOW and values >= LOW and not (q.is_neg() or k.is_neg() or v.is_neg())
        if not there or not (bias is None or in_memory(bias)):
            return forward(make(q, k, v, *others, (), None))[0]
        out = q.new_empty(shape)
        lse = q.new_empty(of_lse, dtype=float32) if return_lse else None
        native.run(
            "kpt_attention_paged",
            *(place, *of_q, out.data_ptr(), *of_out, keys, *of_k, values, *of_v),
            *(0 if lse is None else lse.data_ptr(), *none, 0 if bias is None else bias.data_ptr(), *of_bias),
            *tail,
            threads(),
        )
        return out, lse

    return computed


def _page(x: Tensor) -> tuple[int, ...]:
    """Return the numbers of `structures.Pages`."""
    sequence, head, token, _ = x.stride()
    return x.data_ptr(), sequence, token, head, DTYPES[x.dtype]


def _is_plain(call: Call) -> bool:
    """Return whether PyTorch's own flash attention may serve: inference, full or causal."""
    masked = call.intervals is not None or call.blocks is not None or call.sinks is not None
    masked = masked or _adds(call) or bool(call.softcap) or bool(call.dropout)
    return not (masked or call.needs or call.return_lse or call.q.shape[3] != call.v.shape[3])


def forward(call: Call) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
    """Return the output and the log-sum-exp; save the output, the largest scores and the sums of exponentials.

    In bfloat16, where the processor multiplies it, exponentials are rounded to it for their product with the values;
    their sums are of the unrounded ones.
    """
    if _reads_once(call):
        return _read_once(call), ()
    call = _readable_call(call)
    q = call.q
    out = q.new_empty((*q.shape[:3], call.v.shape[3]))
    largest, total = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    lse = torch.empty_like(largest) if call.return_lse else None
    if largest.numel() > 0:
        native.run("kpt_attention_forward", *_numbers(call, out, largest, total, lse))
    if call.sinks is not None and (spoiled := call.sinks.isnan()).any():  # rows without a key are not computed
        for each in (out, lse):
            if each is not None:
                each[:, spoiled] = math.nan
    return (out, lse), (out, largest, total) if call.needs else ()


def backward(
    call: Call, saved: tuple[Tensor, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> dict[str, Tensor | None]:
    """Return the gradients of what the call wants them of; their sums run in one order for a given number of threads.

    In bfloat16, where the processor multiplies it, probabilities and the gradients of scores are rounded to it for
    their products.
    """
    dtypes = {name: getattr(call, name).dtype for name in call.needs}
    call = _readable_call(call)
    out, largest, total = saved
    out, largest, total = _rows("a result", out), *(readable(NAME, "a sum", x, whole=True) for x in (largest, total))
    grad = torch.zeros_like(out) if grad_out is None else _rows("the gradient of the result", grad_out)
    if grad_lse is not None:
        grad_lse = readable(NAME, "the gradient of the log-sum-exp", grad_lse.float(), whole=True)
    found: dict[str, Tensor | None] = {name: _empty(getattr(call, name)) for name in ("q", "k", "v") if name in dtypes}
    if call.q.numel() == 0:
        return {n: None if n == "sinks" else torch.zeros_like(getattr(call, n), dtype=dtypes[n]) for n in dtypes}
    common = torch.empty_like(total)
    parts = {name: _parts(call, name, total) for name in _ADDED[1:] if name in dtypes}
    bias = total.new_zeros(call.bias.shape) if "bias" in dtypes else None
    # Of a bias that sequences share the gradients of some at a time are summed, not kept for all.
    batch, scores = call.q.shape[0], 4 * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    step = batch if bias is None else max(1, _MOST_PARTS // 4 // max(scores, 1))
    for first in range(0, batch, step):
        own = slice(first, first + step)
        of_scores = None if bias is None else total.new_zeros((*total[own].shape, call.k.shape[2]))
        native.run(
            "kpt_attention_backward",
            *_numbers(_of_sequences(call, own), out[own], largest[own], total[own], None, first),
            *_heads(grad[own]),
            *(address(None if grad_lse is None else grad_lse[own]), common[own].data_ptr()),
            *(number for name in ("q", "k", "v") for number in _heads(_slice(found.get(name), own))),
            *(address(of_scores), *(address(_slice(parts.get(name), own)) for name in _ADDED[1:])),
        )
        if bias is not None and of_scores is not None:
            each = bias if bias.shape[0] == 1 else bias[own]
            each += of_scores.sum_to_size(each.shape)
    for name, part in parts.items():
        found[name] = part.double().sum((0, 2)).view_as(getattr(call, name)).to(dtypes[name])
    if bias is not None:
        found["bias"] = bias.to(dtypes["bias"])
    if "sinks" in dtypes:
        weights = (call.sinks[:, None] - largest).exp_().div_(total)
        found["sinks"] = weights.mul_(common).sum((0, 2)).neg_().to(dtypes["sinks"])
    return found


def _slice(x: Tensor | None, own: slice) -> Tensor | None:
    return None if x is None else x[own]


def _of_sequences(call: Call, own: slice) -> Call:
    """Return the call of some sequences."""
    named = ("q", "k", "v", "intervals", "blocks", "bias")
    given = {name: x for name in named if (x := getattr(call, name)) is not None}
    return call._replace(**{name: x[own] for name, x in given.items() if name in "qkv" or x.shape[0] > 1})


def _parts(call: Call, name: str, like: Tensor) -> Tensor:
    """Return where each tile of queries writes its part of the gradient of `alibi_slopes` or `relative_bias`."""
    batch, heads, queries, _ = call.q.shape
    return like.new_empty((batch, heads, -(-queries // _BLOCK), getattr(call, name)[0].numel()))


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _readable_call(call: Call) -> Call:
    """Return the call with tensors that the kernel can read."""
    changes = {name: _rows(name, getattr(call, name)) for name in ("q", "k", "v")}
    rows, columns = (-(-x.shape[2] // _BLOCK) for x in (call.q, call.k))
    for name in ("intervals", "blocks"):
        if (x := getattr(call, name)) is not None:
            x = readable(NAME, name, x if name == "intervals" else x[:, :, :rows, :columns])
            # What is of one sequence and head must be whole; these may be expanded.
            changes[name] = x if x.numel() > 0 and x[0, 0].is_contiguous() else x.contiguous()
    if call.intervals is not None and call.intervals.shape[3] == 0:  # nothing is seen
        changes["intervals"] = call.intervals.new_zeros((*call.intervals.shape[:3], 1, 2))
    if call.block_bits is not None:
        changes["block_bits"] = readable(NAME, "block_bits", call.block_bits, whole=True)
    for name in ("sinks", *_ADDED[1:]):
        if (x := _numbers_of(call, name)) is not None:
            changes[name] = x
    if call.bias is not None:
        changes["bias"] = _bias(call)
    return call._replace(**changes)


def _numbers_of(call: Call, name: str) -> Tensor | None:
    """Return float32 numbers of heads that a call has, or None."""
    x = getattr(call, name)
    return None if x is None else readable(NAME, name, x.detach().float(), whole=True)


def _bias(call: Call) -> Tensor:
    """Return the bias with contiguous keys."""
    bias: Tensor = call.bias.detach()
    return _rows("bias", bias if bias.dtype in _WIDE else bias.float())


def _rows(name: str, x: Tensor) -> Tensor:
    """Return `x` `[batch, heads, tokens, dim]`, or a copy whose dim is contiguous."""
    x = readable(NAME, name, x)
    return x if x.stride(3) == 1 or x.numel() == 0 else x.contiguous()


def _heads(x: Tensor | None) -> tuple[int, ...]:
    """Return the numbers of `structures.Heads`."""
    return (0, 0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3], DTYPES[x.dtype])


def _table(x: Tensor | None) -> tuple[int, ...]:
    """Return where a part of the mask is, and the strides of sequences and heads, 0 where these have it in common."""
    if x is None:
        return 0, 0, 0
    return x.data_ptr(), *(x.stride(dim) if x.shape[dim] > 1 else 0 for dim in (0, 1))


def _numbers(
    call: Call, out: Tensor, largest: Tensor, total: Tensor, lse: Tensor | None, first: int = 0
) -> tuple[float, ...]:
    """Return the numbers of `structures.Attention`; `first` sequences come before those of the call."""
    batch, heads, queries, dim = call.q.shape
    keys = call.k.shape[2]
    bias = None if call.bias is None else call.bias.expand(batch, heads, queries, keys)
    seed = call.seed + (0 if call.drawn_seed is None else int(call.drawn_seed))
    seed = (seed + 2**63) % 2**64 - 2**63  # as a sum of int64 wraps
    drawing = (seed, call.offset, first * heads * queries, int(call.dropout * (1 << 24)), 1 / (1 - call.dropout))
    return (
        *_heads(call.q),
        *_heads(call.k),
        *_heads(call.v),
        *_heads(out),
        *(largest.data_ptr(), total.data_ptr(), address(lse)),
        *_table(call.intervals),
        0 if call.intervals is None else call.intervals.shape[3],
        *_table(call.blocks),
        address(call.block_bits),
        address(call.sinks),
        *_heads(bias),
        *(address(call.alibi_slopes), address(call.relative_bias)),
        0 if call.relative_bias is None else call.relative_bias.shape[1] // 2,
        *(batch, heads, call.k.shape[1], queries, keys, dim, call.v.shape[3]),
        call.position,
        *(drawing if call.dropout else (0, 0, 0, 0, 0.0)),
        call.causal,
        float(call.scale) if call.scale is not None else 1 / math.sqrt(max(dim, 1)),
        call.softcap,
        torch.get_num_threads(),
    )
