"""`attention.dense` natively: a running softmax over the blocks of keys that queries see, and its gradients."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.attention.few import run
from kpt_backend_cpu.moe.tensors import DTYPES, address, readable
from kpt_backend_cpu.native import asked_instruction_set
from kpt_core import Call, Refusal

NAME = "attention.dense"

#: Packed rows are as long.
MOST_DIM = 256
#: So few queries of so many keys leave most of a tile empty.
_FEW_QUERIES, _MANY_KEYS = 16, 256
_HAS_AMX = torch.cpu._is_amx_tile_supported()
#: What is left to kernels in plain PyTorch.
_REFUSED = ("bias", "alibi_slopes", "relative_bias")


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for this kernel, or None."""
    for name in _REFUSED:
        if getattr(call, name) is not None:
            return Refusal("{name} is given; this kernel adds nothing to the scores", name=name)
    if call.dropout:
        return "dropout is asked for; this kernel has none"
    most = max(call.q.shape[3], call.v.shape[3])
    if most > MOST_DIM:
        return Refusal("a dim of {dim}; this kernel takes at most {most}", dim=most, most=MOST_DIM)
    queries, keys = call.q.shape[2], call.k.shape[2]
    if queries < _FEW_QUERIES and keys >= _MANY_KEYS and not _reads_once(call):
        return Refusal("{queries} queries of many keys, under such a mask or with a gradient; this kernel computes "
                       "with at least {least}", queries=queries, least=_FEW_QUERIES)  # fmt: skip
    if (
        _HAS_AMX
        and not _reads_once(call)
        and call.q.dtype is torch.bfloat16
        and not asked_instruction_set()
        and _is_plain(call)
    ):
        return (
            "bfloat16 on a processor with AMX, by which PyTorch's flash attention multiplies, and this kernel does not"
        )
    if max(queries + abs(call.position), keys) >= 2**31 - 256:
        return Refusal("{keys} keys; this kernel counts them in 32 bits", keys=keys)
    return None


def _reads_once(call: Call) -> bool:
    """Return whether few queries of many keys may go to the kernel that reads each key once, as decoding wants."""
    _, heads, queries, _ = call.q.shape
    keys, intervals = call.k.shape[2], call.intervals
    if queries >= _FEW_QUERIES or keys < _MANY_KEYS or call.needs or call.blocks is not None or heads == 0:
        return False
    return intervals is None or (queries == 1 and intervals.shape[1] == 1 and intervals.shape[3] == 1)


def _read_once(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp of few queries."""
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    out = call.q.new_empty((batch, queries, heads, call.v.shape[3]))
    lse = call.q.new_empty((batch, queries, heads), dtype=torch.float32) if call.return_lse else None
    ends = torch.arange(batch + 1, dtype=torch.int32) * queries
    past = torch.full((queries,), keys, dtype=torch.int32)
    if call.causal:
        past = (torch.arange(queries, dtype=torch.int32) + (call.position + 1)).clamp_(0, keys)
    spans = torch.stack((torch.zeros_like(past), past), 1).repeat(batch, 1)
    if call.intervals is not None:
        given = call.intervals[:, 0, 0, 0].clamp(0, keys)
        spans = torch.stack((given[:, 0].expand(batch), given[:, 1].minimum(spans[:, 1])), 1)
    q, k, v = (_rows(name, getattr(call, name)) for name in ("q", "k", "v"))
    few = Few(
        q.transpose(1, 2).flatten(0, 1), k.transpose(1, 2), v.transpose(1, 2), call.sinks, call.scale, call.softcap
    )
    sums = None if lse is None else lse.flatten(0, 1)
    run(NAME, few, out.flatten(0, 1), sums, ends, spans, None)
    return out.transpose(1, 2).contiguous(), None if lse is None else lse.transpose(1, 2).contiguous()


class Few(NamedTuple):
    """Hold what `run` takes of a call: a sequence's keys are a page."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    sinks: Tensor | None
    scale: float | None
    softcap: float
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def _is_plain(call: Call) -> bool:
    """Return whether PyTorch's own flash attention may serve: inference, full or causal."""
    masked = call.intervals is not None or call.blocks is not None or call.sinks is not None
    return not (masked or call.needs or call.return_lse or call.softcap or call.q.shape[3] != call.v.shape[3])


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
    of_sinks = None if call.sinks is None else call.sinks.dtype
    call = _readable_call(call)
    out, largest, total = saved
    out, largest, total = _rows("a result", out), *(readable(NAME, "a sum", x, whole=True) for x in (largest, total))
    grad = torch.zeros_like(out) if grad_out is None else _rows("the gradient of the result", grad_out)
    if grad_lse is not None:
        grad_lse = readable(NAME, "the gradient of the log-sum-exp", grad_lse.float(), whole=True)
    wanted: dict[str, Tensor] = {name: _empty(getattr(call, name)) for name in ("q", "k", "v") if name in call.needs}
    if call.q.numel() == 0:
        found: dict[str, Tensor | None] = {name: each.zero_() for name, each in wanted.items()}
        return found | ({"sinks": None} if "sinks" in call.needs else {})
    common = torch.empty_like(total)
    native.run(
        "kpt_attention_backward",
        *_numbers(call, out, largest, total, None),
        *_heads(grad),
        *(address(grad_lse), common.data_ptr()),
        *(number for name in ("q", "k", "v") for number in _heads(wanted.get(name))),
    )
    found = dict(wanted)
    if "sinks" in call.needs:
        weights = (call.sinks[:, None] - largest).exp_().div_(total)
        found["sinks"] = weights.mul_(common).sum((0, 2)).neg_().to(of_sinks)
    return found


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _readable_call(call: Call) -> Call:
    """Return the call with tensors that the kernel can read."""
    changes = {name: _rows(name, getattr(call, name)) for name in ("q", "k", "v")}
    for name in ("intervals", "blocks"):
        if (x := getattr(call, name)) is not None:
            x = readable(NAME, name, x)
            # What is of one sequence and head must be whole; these may be expanded.
            changes[name] = x if x.numel() > 0 and x[0, 0].is_contiguous() else x.contiguous()
    if call.intervals is not None and call.intervals.shape[3] == 0:  # nothing is seen
        changes["intervals"] = call.intervals.new_zeros((*call.intervals.shape[:3], 1, 2))
    if call.block_bits is not None:
        changes["block_bits"] = readable(NAME, "block_bits", call.block_bits, whole=True)
    if call.sinks is not None:
        changes["sinks"] = readable(NAME, "sinks", call.sinks.detach().float(), whole=True)
    return call._replace(**changes)


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


def _numbers(call: Call, out: Tensor, largest: Tensor, total: Tensor, lse: Tensor | None) -> tuple[float, ...]:
    """Return the numbers of `structures.Attention`."""
    batch, heads, queries, dim = call.q.shape
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
        *(batch, heads, call.k.shape[1], queries, call.k.shape[2], dim, call.v.shape[3]),
        call.position,
        call.causal,
        float(call.scale) if call.scale is not None else 1 / math.sqrt(max(dim, 1)),
        call.softcap,
        torch.get_num_threads(),
    )
