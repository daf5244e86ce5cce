"""Forecast what a language model takes of a device: memory, and time at the least; nothing is computed.

The model of transformers lies on `meta`, so that it takes no memory here either. Memory and calls are those of a run on
fake tensors; attention is taken to be fused, as it is on every device that KPT serves: no scores lie in memory.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from kpt_core.contract import Call, Op
from kpt_core.errors import InputError, UnknownNameError
from kpt_core.registry import get_op

from .devices import Peaks
from .memory import LevelEstimate, MemoryEstimate, compare_levels, estimate, format_bytes
from .memory.fit import remedies

#: Name by which transformers knows the attention that leaves no scores in memory.
ATTENTION = "kpt_forecast"
#: Sides of the blocks of 8-bit weights that share a scale, as in checkpoints of 8-bit models.
_BLOCK = 128
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # it runs on `meta` too
#: What a step's parts are called, by the op.
PARTS = {
    "linear": "linear layers",
    "fp8.linear": "linear layers",
    "attention.dense": "attention",
    "moe.experts": "experts",
}


@dataclass(frozen=True, slots=True)
class Step:
    """What a step does at the least: floating-point operations, and bytes of memory read and written."""

    name: str
    flops: int
    nbytes: int
    parts: tuple["Step", ...] = ()

    def seconds(self, peaks: Peaks, tflops: float | None) -> tuple[float, str]:
        """Return the roofline's time, and what bounds it; without a known rate it is the memory's alone."""
        moving = self.nbytes / (peaks.bandwidth * 1e9)
        computing = 0.0 if tflops is None else self.flops / (tflops * 1e12)
        return max((moving, "memory"), (computing, "arithmetic"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Equal calls of a step.

    Attributes:
        op: its name; `linear` is a layer that torch's own product runs.
        call: of KPT's op, on `meta`; None for `linear`, and where the op's package is not installed.
        sizes: of the first tensor; of linear layers rows, inputs and outputs.
        note: what sizes don't tell, as in `causal, 64 keys of 8 heads`.
        count: number of calls.
        flops: of all of them.
        nbytes: of weights that all of them read, or keys and values.
    """

    op: str
    call: Call | None
    sizes: tuple[int, ...]
    note: str = ""
    count: int
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a model takes; in bytes.

    Attributes:
        parameters: their number.
        weights: of parameters and buffers, by dtype.
        fp8_weights: what their sum would be with 8-bit matrices.
        activations: of inference the most that is alive beside the rest, of training what a forward pass leaves.
        peak: the most that is alive at one time: while gradients come, activations go.
        calls: attention, linear layers and other ops that KPT serves, of all steps.
        steps: of inference prefill and decode, or one alone if the model gives no tokens; of training the step.
        levels: of training, what each level of activation checkpointing takes; `peak` is that of the first, `none`.
        helps: of training, gives what else makes a step fit into so many bytes.
    """

    parameters: int
    weights: dict[str, int]
    fp8_weights: int
    kv_cache: int
    activations: int
    gradients: int
    optimizer_state: int
    peak: int
    calls: tuple[Work, ...]
    steps: tuple[Step, ...]
    levels: tuple[LevelEstimate, ...] = ()
    helps: Callable[[int], list[str]] | None = None

    def remedies(self, memory: int, tokens: int) -> list[str]:
        """Return what would make it fit into so many bytes, a phrase each; nothing if it fits."""
        if self.peak <= memory:
            return []
        found, lean = [], self.peak - sum(self.weights.values()) + self.fp8_weights
        if self.helps is not None:
            fitting = [each for each in self.levels if each.memory.peak <= memory]
            if fitting:
                best = min(fitting, key=lambda each: each.flops)
                return [
                    f"kpt_optimize.memory.checkpoint_blocks(model, {best.level!r}): {format_bytes(best.memory.peak)}, "
                    f"{best.flops:.2f} times the operations"
                ]
            found += self.helps(memory)
        elif lean < self.peak:
            fits = "" if lean <= memory else f", which alone is not enough: {ceil(lean / memory)} devices"
            found.append(f"8-bit weights (--weights fp8): {format_bytes(lean)}{fits}")
        grows = self.kv_cache + self.activations
        room = memory - (self.peak - grows) if not self.gradients else 0
        if (fewer := int(tokens * room / grows)) > 0:
            found.append(f"a context of about {fewer} tokens (--tokens {fewer})")
        return [*found, f"{ceil(self.peak / memory)} such devices at the least, if all is split evenly among them"]


def register_attention() -> None:
    """Make `ATTENTION` known to transformers, as an attention implementation without a mask in memory."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = _FUSED(query, key, value, dropout, bool(causal) and query.shape[-2] > 1)[0]
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _flops_of_attention(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    flops: int = sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:]))
    return flops // 2 if causal else flops  # the half above the diagonal is not computed


class _Calls(TorchDispatchMode):
    """Count calls of KPT's ops and of fused attention; tensors are kept as shapes, so that none lives longer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("kpt::") and not name.endswith("_backward"):
            told = ((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each for each in args)
            self.found[name.removeprefix("kpt::").replace("_", ".", 1), *told] += 1
        elif func.overloadpacket is _FUSED:
            told = ((tuple(each.shape), each.dtype) for each in args[:3])
            self.found["attention.dense", *told, args[4:5] == (True,)] += 1
        return func(*args, **(kwargs or {}))


def _note_linear(found: Counter[tuple[Any, ...]], layer: Any, args: tuple[Any, ...], out: Tensor) -> None:
    """Note a layer as it is called; GPT-2's have a transposed weight."""
    x, shape, biased = args[0], (out.shape[-1], args[0].shape[-1]), layer.bias is not None
    found["linear", x.numel() // x.shape[-1], shape, x.dtype, layer.weight.dtype, biased, layer] += 1


class _Run(nn.Module):
    """Run a model as it is used, and note what a step does."""

    def __init__(self, model: nn.Module, training: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.trains = training
        self.kv_cache = 0
        self.calls: list[Counter[tuple[Any, ...]]] = []
        self.flops: list[int] = []

    def forward(self, ids: Tensor) -> Any:
        """Read all tokens; for inference also give one more."""
        if self.trains:
            return self._step(input_ids=ids, labels=ids, use_cache=False).loss
        out = self._step(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache = getattr(out, "past_key_values", None)
        states = [vars(layer) for layer in getattr(cache, "layers", ())]
        self.kv_cache = sum(leaf.nbytes for leaf in tree_iter(states) if isinstance(leaf, Tensor))
        del states
        if cache is None and not self.model.can_generate():
            return None
        out.logits = None
        self._step(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        return None

    def _step(self, **options: Any) -> Any:
        from transformers.pytorch_utils import Conv1D

        counter = FlopCounterMode(display=False, custom_mapping={_FUSED: _flops_of_attention})
        with counter, _Calls() as calls:
            layers = [each for each in self.model.modules() if isinstance(each, (nn.Linear, Conv1D))]
            hooks = [each.register_forward_hook(partial(_note_linear, calls.found)) for each in layers]
            try:
                out = self.model(**options)
            finally:
                for hook in hooks:
                    hook.remove()
        self.calls.append(calls.found)
        self.flops.append(counter.get_total_flops())
        return out


def forecast(model: nn.Module, *, batch: int, tokens: int, training: bool = False, fp8: bool = False) -> Forecast:
    """Forecast one batch of sequences of `tokens` tokens.

    Args:
        model: of transformers, on `meta`, made with `attn_implementation=ATTENTION`.
        batch: number of sequences.
        tokens: of each: what is read, and for inference what the cache holds.
        training: a step of training with AdamW, all in the dtype of the parameters; else inference.
        fp8: hold matrices in 8 bits, with a scale for each block; embeddings and the output's matrix stay.

    Raises:
        InputError: training with 8-bit weights, or the model reads values of tensors, or fails on fake ones.
    """
    if training and fp8:
        raise InputError("8-bit weights are for inference: they get no gradients; train without --weights fp8")
    run = _Run(model, training)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    levels = compare_levels(run, ids) if training else ()
    found = levels[0].memory if training else estimate(run, ids, training=False)
    noted = run.calls[:1] if training else run.calls  # of levels the first's
    ends: list[Any] = [getattr(model, f"get_{side}_embeddings")() for side in ("input", "output")]
    whole = {id(end.weight) for end in ends if end is not None}
    done = [_works(each, fp8, training, [end for end in ends if end is not None]) for each in noted]
    sizes = {id(p): (p.dtype, p.nbytes, p.nbytes if id(p) in whole else _fp8_bytes(p)) for p in model.parameters()}
    weights: Counter[str] = Counter()
    for dtype, nbytes, nbytes8 in sizes.values():
        weights[_name(torch.float8_e4m3fn if fp8 and nbytes8 < nbytes else dtype)] += nbytes8 if fp8 else nbytes
    for buffer in model.buffers():
        weights[_name(buffer.dtype)] += buffer.nbytes
    fp8_weights = sum(each[2] for each in sizes.values()) + found.buffers

    def read(calls: Counter[tuple[Any, ...]]) -> int:
        """Bytes of weights that a step reads: each once, of experts those that have rows."""
        untied = ends[0] is not None and (ends[1] is None or ends[0].weight is not ends[1].weight)
        total = sum(weights.values()) - (ends[0].weight.nbytes if untied else 0)
        return ceil(total - sum(count * _idle_bytes(call, fp8) for call, count in calls.items()))

    if training:
        size = sum(weights.values())
        moved = 3 * size + 2 * found.gradients + 2 * found.optimizer_state
        steps = [Step(f"training, {batch} x {tokens} tokens", 3 * run.flops[0], moved, _parts(done[0], 3))]
    else:
        names = [f"prefill, {batch} x {tokens} tokens", f"decode, {batch} x 1 token"]
        if len(noted) == 1:
            names = [f"forward, {batch} x {tokens} tokens"]
        steps = [
            Step(name, flops, read(called) + run.kv_cache, _parts(works))
            for name, flops, called, works in zip(names, run.flops, noted, done, strict=True)
        ]
    held = found.parameters + found.buffers + found.gradients + found.optimizer_state + run.kv_cache
    return Forecast(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=dict(weights),
        fp8_weights=fp8_weights,
        kv_cache=run.kv_cache,
        activations=found.activations if training else found.peak - held,
        gradients=found.gradients,
        optimizer_state=found.optimizer_state,
        peak=found.peak - found.parameters - found.buffers + sum(weights.values()),
        calls=tuple(work for works in done for work in works),
        steps=tuple(steps),
        levels=levels,
        helps=partial(remedies, model, min((each.memory for each in levels), key=_peak)) if levels else None,
    )


def _peak(memory: MemoryEstimate) -> int:
    return memory.peak


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fp8_bytes(parameter: Tensor) -> int:
    """Return the size of a parameter in 8 bits with its scales; its own where it is no matrix."""
    if parameter.dim() < 2 or parameter.itemsize == 1:
        return parameter.nbytes
    rows, columns = parameter.shape[-2:]
    return parameter.numel() + 4 * prod(parameter.shape[:-2]) * ceil(rows / _BLOCK) * ceil(columns / _BLOCK)


def _idle_bytes(told: tuple[Any, ...], fp8: bool) -> float:
    """Return the bytes of experts without a token that a call of `moe.experts` need not read, if the router is fair."""
    if told[0] != "moe.experts":
        return 0.0
    _, call = _call(told)
    experts, (rows, chosen) = call.gate_up_proj.shape[0], call.top_k_index.shape
    nbytes = sum(_fp8_bytes(each) if fp8 else each.nbytes for each in (call.gate_up_proj, call.down_proj))
    idle: float = (1 - min(chosen / experts, 1)) ** rows
    return nbytes * idle


def _works(calls: Counter[tuple[Any, ...]], fp8: bool, training: bool, ends: list[nn.Module]) -> tuple[Work, ...]:
    """Return what `_Calls` noted of a step; layers of one size together, those of `ends` never in 8 bits."""
    linear: Counter[tuple[Any, ...]] = Counter()
    works = []
    for told, count in calls.items():
        if told[0] == "linear":
            rows, shape, dtype, kept, biased, layer = told[1:]
            quantised = fp8 and kept.itemsize > 1 and all(layer is not end for end in ends)
            linear[rows, shape, dtype, kept, biased, quantised] += count
        elif told[0] == "attention.dense":
            works.append(_attention_work(told, training, count))
        else:
            op, call = _call(told)
            first = getattr(call, next(iter(op.kinds)))
            flops = 0 if op.flops is None else count * op.flops(call)
            nbytes = 0
            if op.name == "moe.experts":
                sizes = (_fp8_bytes(each) if fp8 else each.nbytes for each in (call.gate_up_proj, call.down_proj))
                nbytes = ceil(count * (sum(sizes) - _idle_bytes(told, fp8)))
            works.append(Work(op=op.name, call=call, sizes=tuple(first.shape), count=count, flops=flops, nbytes=nbytes))
    return (*works, *(_linear_work(told, count) for told, count in linear.items()))


def _parts(works: tuple[Work, ...], times: int = 1) -> tuple[Step, ...]:
    """Return the parts of a step that does everything so many times."""
    flops: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for work in works:
        if (part := PARTS.get(work.op)) is not None:
            flops[part] += times * work.flops
            nbytes[part] += times * work.nbytes
    return tuple(Step(part, flops[part], nbytes[part]) for part in flops)


def _attention_work(told: tuple[Any, ...], training: bool, count: int) -> Work:
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in told[1:4])
    causal = told[4]
    call = _bound("attention.dense", ("q", "k", "v") if training else (), q, k, v, causal=causal, return_lse=False)
    return Work(
        op="attention.dense",
        call=call,
        sizes=tuple(q.shape),
        note=f"{'causal, ' if causal else ''}{k.shape[2]} keys of {k.shape[1]} heads",
        count=count,
        flops=count * _flops_of_attention(q.shape, k.shape, v.shape, causal=causal),
        nbytes=count * (k.nbytes + v.nbytes),
    )


def _linear_work(told: tuple[Any, ...], count: int) -> Work:
    """Return the layers of one size."""
    rows, shape, dtype, kept, biased, quantised = told
    outputs, inputs = shape
    weight = torch.empty(shape, dtype=kept, device="meta")
    call, nbytes = None, weight.nbytes
    if quantised:
        nbytes = _fp8_bytes(weight)
        call = _bound(
            "fp8.linear",
            (),
            torch.empty(rows, inputs, dtype=dtype, device="meta"),
            torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(ceil(outputs / _BLOCK), ceil(inputs / _BLOCK), device="meta"),
            torch.empty(outputs, dtype=dtype, device="meta") if biased else None,
            granularity=f"{_BLOCK}x{_BLOCK}",
        )
    return Work(
        op="fp8.linear" if quantised else "linear",
        call=call,
        sizes=(rows, inputs, outputs),
        count=count,
        flops=2 * count * rows * inputs * outputs,
        nbytes=count * (nbytes + biased * outputs * kept.itemsize),
    )


def _bound(name: str, needs: tuple[str, ...], *args: Any, **options: Any) -> Call | None:
    """Return the call of an op, None where its package is not installed."""
    try:
        op = get_op(name)
    except UnknownNameError:
        return None
    return op.Call(*op.bind(*args, **options)[: len(op.parameters)], needs, None)


def _call(told: tuple[Any, ...]) -> tuple[Op[..., Any], Call]:
    """Return an op and its call on `meta`, of what `_Calls` noted."""
    name, *values, needs = told
    tensors = [torch.empty(v[0], dtype=v[1], device="meta") if isinstance(v, tuple) else v for v in values]
    op = get_op(name)
    return op, op.Call(*tensors, tuple(needs.split(",")) if needs else (), None)
