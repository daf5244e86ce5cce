"""`attention.dense` on GPUs by PyTorch's FlexAttention, compiled: any mask, whatever changes scores, the log-sum-exp.

The mask is the plan's: blocks that are dead cost nothing, full ones no mask. One program serves all lengths. Which
blocks these are is found by another one, once for all layers that share a plan.
"""

import math
import types
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kpt_attention.dense import scale_of, wide_dtype
from kpt_attention.dropout import kept_from, least_of, seed_of, start_of
from kpt_attention.plan import BLOCK, Plan, block_lists, block_mask_of
from kpt_core import Call, Refusal

#: `kpt_attention.plan.block_lists`, and the keys that nobody sees, if there are any.
Lists = tuple[list[Tensor], Tensor | None]
#: Dimensions that its programs are made for.
_LEAST_DIM, _MOST_DIM = 16, 256
#: Programs of one kind of call: of each dtype, with gradients and without, of static sizes first.
_MOST_PROGRAMS = 64
#: Keys of torch's dispatcher by which functions are transformed.
_OF_TRANSFORMS = (
    "FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchBatched", "FuncTorchVmapMode",
    "FuncTorchGradWrapper", "PythonTLSSnapshot",
)  # fmt: skip


try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch 2.8
    _WITH_LSE: dict[str, Any] = {"return_lse": True}
else:
    _WITH_LSE = {"return_aux": AuxRequest(lse=True)}


def unsupported(call: Call) -> Refusal | str | None:
    """Return why FlexAttention does not take a call."""
    q, v = call.q, call.v
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (q, call.k, v))):
        return "tensors of torch.func; FlexAttention is compiled, and its compiler takes none"
    if q.dtype is torch.float64:
        return "float64; FlexAttention takes 32 bits and 16 on a GPU"
    if not (q.numel() and call.k.numel() and v.numel()):
        return "there is nothing to compute"
    if not all(_LEAST_DIM <= dim <= _MOST_DIM for dim in (q.shape[3], v.shape[3])):
        return Refusal(
            "dims {dim} and {other}; FlexAttention takes {least} to {most}",
            dim=q.shape[3], other=v.shape[3], least=_LEAST_DIM, most=_MOST_DIM,
        )  # fmt: skip
    return None


def forward(call: Call) -> Any:
    """Return the output and, where it is asked for, the log-sum-exp; autograd differentiates them."""
    out, lse = _compiled(_kind(call))(call)
    return out, lse if call.return_lse else None


def lists_of(call: Call) -> Lists | None:
    """Return the lists of live blocks, and which keys nobody sees; None if everybody sees all."""
    if not (call.causal or call.intervals is not None or call.blocks is not None):
        return None
    return block_lists(_plan(call), call.q.shape[2], call.k.shape[2], call.q.device), _unseen(call)


def begin_of(call: Call) -> Tensor | None:
    """Return where dropout's generator begins; None without dropout."""
    return start_of(seed_of(call), call.offset, call.q.device) if call.dropout else None


def _plan(call: Call) -> Plan:
    return Plan(call.causal, call.position, call.intervals, call.blocks, call.block_bits)


def attend(
    call: Call, lists: Lists | None, flex_attention: Callable[..., Any], start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by a function that takes what torch's `flex_attention` takes.

    Dropout is a second attention, to what is kept alone: its output is what the first one's would be but for the sum
    that it is divided by, and the two log-sum-exps tell by how much. `start` is where its generator begins.
    """
    q, k, v = call.q, call.k, call.v
    mask = None
    if lists is not None:
        mask = block_mask_of(_plan(call), lists[0], q.shape[2], k.shape[2])
        hidden = lists[1]
        if hidden is not None:  # it multiplies them by zero, and NaN would stay
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    wide, how = (
        wide_dtype(q.dtype),
        {"block_mask": mask, "scale": scale_of(call), "enable_gqa": q.shape[1] != k.shape[1]},
    )

    def attended(values: Tensor, begin: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = flex_attention(q, k, values, score_mod=_score_mod(call, begin), **how, **_WITH_LSE)
        return out, (lse if isinstance(lse, Tensor) else lse.lse).to(wide)

    out, own = attended(v, start)
    # Of what is not dropped, too, the log-sum-exp alone is asked for.
    lse = own if start is None else attended(v[..., :_LEAST_DIM], None)[1]
    if call.sinks is not None:  # one more key of which the value is zero
        lse = torch.logaddexp(lse, call.sinks.to(wide)[:, None].expand_as(lse))
    if lse is not own:
        dead = own == -math.inf
        weight = (own.masked_fill(dead, 0) - lse.masked_fill(dead, 0)).exp().masked_fill(dead, 0) / (1 - call.dropout)
        out = (out.to(wide) * weight.unsqueeze(-1)).to(q.dtype)
    return out.contiguous(), lse.contiguous()


def _score_mod(call: Call, start: Tensor | None) -> Callable[..., Tensor] | None:
    """Return the function of a score, if anything changes it: cap first, then what is added, then what is dropped."""
    slopes, table, bias = call.alibi_slopes, call.relative_bias, call.bias
    if not call.softcap and slopes is None and table is None and bias is None and start is None:
        return None
    (heads, queries), least = call.q.shape[1:3], least_of(call.dropout)
    # A tensor, since compilers make another program for each number.
    softcap = call.q.new_full((), call.softcap, dtype=torch.float32) if call.softcap else None
    position, far = call.position, 0 if table is None else table.shape[1] // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        distance = k - q - position
        if slopes is not None:
            score = score - slopes[h] * distance.abs()
        if table is not None:
            score = score + table[h, distance.clamp(-far, far) + far]
        if bias is not None:
            at = (each if size > 1 else each * 0 for each, size in zip((b, h, q, k), bias.shape, strict=True))
            score = score + bias[tuple(at)]
        if start is not None:
            row = (b.long() * heads + h) * queries + q
            score = torch.where(kept_from(least, start, row, k.long()), score, -math.inf)
        return score

    return score_mod


def _unseen(call: Call) -> Tensor | None:
    """Return the keys that no query of any head of theirs sees, `[B or 1, Hkv or 1, K, 1]`; None if there are none.

    What hides a key from all: causality where the queries end before it, intervals and blocks. That two of these
    together hide one which neither does is left out: such a key is in a block of a mask, which is masked.
    """
    (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    seen: Tensor | None = None
    if call.causal and call.position + queries < keys:
        seen = torch.arange(keys, device=call.q.device).view(1, 1, keys) < call.position + queries
    if call.intervals is not None:
        begins, ends = (each.flatten(2).clamp(0, keys).long() for each in call.intervals.unbind(-1))
        ends = torch.maximum(begins, ends)
        marks = begins.new_zeros((*begins.shape[:2], keys + 1))
        ones = torch.ones_like(begins)
        inside = marks.scatter_add(2, begins, ones).scatter_add(2, ends, -ones).cumsum(2)[..., :keys] > 0
        seen = inside if seen is None else seen & inside
    if call.blocks is not None:
        columns = torch.cat((call.block_bits.new_zeros(1, BLOCK // 8), call.block_bits.new_full((1, BLOCK // 8), 255),
                             _any_row(call.block_bits)))  # fmt: skip
        rows, across = -(-queries // BLOCK), -(-keys // BLOCK)
        bytes_ = columns[call.blocks[:, :, :rows, :across].long()]
        bits = (bytes_.unsqueeze(-1) >> torch.arange(8, device=bytes_.device, dtype=torch.uint8)) & 1
        inside = bits.bool().flatten(-2).any(2).flatten(2)[..., :keys]
        seen = inside if seen is None else seen & inside
    if seen is None:
        return None
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (kv_heads, heads // kv_heads)).any(2)
    return ~seen.unsqueeze(-1)


def _any_row(bits: Tensor) -> Tensor:
    """Return the bytes of the keys that some row of each block sees, `[n, 16]` of `[n, 128, 16]`."""
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    some = ((bits.unsqueeze(-1) >> places) & 1).amax(1)
    return (some << places).sum(-1, dtype=torch.uint8)


def _kind(call: Call) -> tuple[object, ...]:
    """Return what makes another program of a call, but for dtypes and sizes; numbers are part of a program."""
    given = ("intervals", "blocks", "alibi_slopes", "relative_bias", "bias", "sinks")
    numbers = scale_of(call), call.causal, bool(call.softcap), call.dropout
    return *numbers, *(getattr(call, name) is not None for name in given)


@cache
def _compiled(kind: tuple[object, ...], backend: str = "inductor") -> Callable[[Call], tuple[Tensor, Tensor]]:
    """Return `lists_of` and `attend`, each compiled whole, for calls of one kind, whatever their sizes."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    def program(call: Call, lists: Lists | None, start: Tensor | None) -> Any:
        return attend(call, lists, flex_attention, start)

    def listing(call: Call) -> Any:
        return lists_of(call)

    find, run = _of_its_own(listing, backend), _of_its_own(program, backend)
    # Numbers are part of a program. Past its limit torch would have all scores in memory without a word.
    settings = {"recompile_limit": _MOST_PROGRAMS, "fail_on_recompile_limit_hit": True, "specialize_float": True}

    def attend_to(call: Call) -> Any:
        start = begin_of(call)
        call = call._replace(seed=0, offset=0, drawn_seed=None)  # a program each, if they were a part of it
        with config.patch(settings), _transforms_again():
            return run(call, _once(call, find), start)

    return attend_to


def _of_its_own(program: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a compiled copy of a function: torch counts recompilations by code, and each kind of call has its own."""
    own = types.FunctionType(program.__code__.replace(), program.__globals__, closure=program.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True, backend=backend)


#: By a tensor of a plan: by sizes and stream, the versions of all its tensors, the others, and the lists.
_known: MutableMapping[Tensor, dict[object, Any]] = WeakIdKeyDictionary()


def _once(call: Call, find: Callable[[Call], Lists | None]) -> Lists | None:
    """Return the lists of a call's plan, found anew where a tensor of it is another or was written to.

    Nothing is kept of what a CUDA graph holds, whose replays read what the tensors have then; nor of inference tensors,
    of which torch does not tell whether they were written to; nor where the plan has no tensor.
    """
    tensors = [each for each in (call.intervals, call.blocks, call.block_bits) if each is not None]
    if not tensors or any(each.is_inference() for each in tensors) or type(tensors[0]) is not Tensor:
        return find(call)
    stream = 0
    if call.q.device.type != "cpu":
        module = torch.get_device_module(call.q.device)
        if call.q.is_cuda and module.is_current_stream_capturing():
            return find(call)
        stream = module.current_stream(call.q.device).stream_id
    sizes = call.causal, call.position, call.q.shape[1:3], call.k.shape[1:3], call.q.device, stream
    kept, versions = _known.setdefault(tensors[0], {}), [each._version for each in tensors]
    before, others, lists = kept.get(sizes, (None, (), None))
    found: Lists | None = lists
    if before != versions or any(one() is not other for one, other in zip(others, tensors[1:], strict=True)):
        found = find(call)
        kept[sizes] = versions, [weakref.ref(each) for each in tensors[1:]], found
    return found


def _transforms_again() -> AbstractContextManager[object]:
    """Let tracing use functorch where a mode's handler runs, as in a graph's first run: torch takes its keys away."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    if not excluded.has(keys.FuncTorchBatched):
        return nullcontext()
    for name in _OF_TRANSFORMS:
        excluded = excluded.remove(getattr(keys, name))
    guard: AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard
