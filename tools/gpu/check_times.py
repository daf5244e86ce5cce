"""Time of each program by the profiler, at a real model's sizes, and what it takes of the chip.

Shapes are of Qwen3-30B (experts, 16k tokens) and Llama 8B (attention, 8k tokens; FP8).
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_contests import Heads, mask_of
from devices import measure_ceilings
from rows import Row
from setting import Setting
from torch.profiler import ProfilerActivity, profile

import kpt_core
from kpt_core.dispatch.autograd import wanted

#: Makes the name of an op and its arguments.
Make = Callable[[Setting], tuple[str, Mapping[str, Any]]]
#: Calls that are profiled, after as many that warm up.
_CALLS = 3


def _names(setting: Setting) -> Iterator[tuple[str, Make]]:
    yield "experts", experts
    yield "grouped_mm", lambda setting: grouped(setting, "moe.grouped_mm")
    yield "grouped_mm_wgrad", lambda setting: grouped(setting, "moe.grouped_mm_wgrad")
    yield "scaled_grouped_mm", lambda setting: grouped(setting, "moe.scaled_grouped_mm")
    yield "top_k_gating", _gating
    for kind in ("causal", "full", "documents"):
        yield f"attention, {kind}", partial(attention, kind=kind)
    yield "fp8.quantize", _quantize


PARAMETERS = {"made": _names}


def _sizes(setting: Setting) -> tuple[int, int, int, int, int]:
    """Return tokens, hidden and intermediate size, experts, and experts of a token."""
    return (12, 32, 16, 4, 2) if setting.tiny else (16384, 2048, 768, 128, 8)


def _normal(setting: Setting, *size: int, spread: float = 1.0) -> torch.Tensor:
    dtype = setting.dtype(torch.bfloat16)
    return torch.empty(size, dtype=dtype, device=setting.device).normal_(0, spread)


def experts(setting: Setting) -> tuple[str, Mapping[str, Any]]:
    """Return the experts, with gradients of all that has one."""
    tokens, hidden, inner, experts, top_k = _sizes(setting)
    scores = torch.rand(tokens, experts, device=setting.device)
    weights, index = scores.softmax(-1).topk(top_k)
    x = _normal(setting, tokens, hidden)
    matrices = {
        "gate_up_proj": _normal(setting, experts, 2 * inner, hidden, spread=hidden**-0.5),
        "down_proj": _normal(setting, experts, hidden, inner, spread=inner**-0.5),
    }
    leaves = {"x": x, "top_k_weights": weights.to(x.dtype), **matrices}
    return "moe.experts", {"top_k_index": index, **{n: each.requires_grad_() for n, each in leaves.items()}}


def grouped(setting: Setting, op: str) -> tuple[str, Mapping[str, Any]]:
    """Return a product of `moe.`: rows of uneven groups."""
    tokens, hidden, inner, experts, top_k = _sizes(setting)
    rows = tokens * top_k
    offsets = torch.rand(experts, device=setting.device).cumsum(0)
    offsets = (offsets / offsets[-1] * rows).round().int()
    x, weight = _normal(setting, rows, hidden), _normal(setting, experts, 2 * inner, hidden, spread=hidden**-0.5).mT
    if op == "moe.grouped_mm_wgrad":
        return op, {"x": x, "grad": _normal(setting, rows, 2 * inner), "offsets": offsets}
    if op == "moe.scaled_grouped_mm":
        from kpt_fp8 import quantize_to_fp8

        narrow = quantize_to_fp8(weight.mT)
        return op, {"x": x, "weight": narrow.codes.mT, "scale": narrow.scale[:, None], "offsets": offsets}
    return op, {"x": x, "weight": weight, "offsets": offsets}


def _gating(setting: Setting) -> tuple[str, Mapping[str, Any]]:
    tokens, _, _, experts, top_k = _sizes(setting)
    return "moe.top_k_gating", {"logits": torch.randn(tokens, experts, device=setting.device), "top_k": top_k}


def attention(setting: Setting, kind: str) -> tuple[str, Mapping[str, Any]]:
    """Return attention under a mask, with gradients where it has some."""
    heads = Heads("tiny", 70, 4, 2, 16) if setting.tiny else Heads("Llama 8B", 8192, 32, 8, 128)
    plan = mask_of(kind, heads.tokens, setting.device).plan(heads.tokens, device=setting.device)
    q, k, v = (_normal(setting, 1, h, heads.tokens, heads.head_dim) for h in (heads.heads, *2 * (heads.kv_heads,)))
    # FlexAttention has no backward on a CPU.
    needs = setting.on_gpu or kind != "documents"
    leaves = {name: each.requires_grad_(needs) for name, each in zip("qkv", (q, k, v), strict=True)}
    return "attention.dense", {**leaves, **plan.arguments(heads.tokens, heads.tokens), "return_lse": False}


def _quantize(setting: Setting) -> tuple[str, Mapping[str, Any]]:
    rows, inner = (70, 128) if setting.tiny else (16384, 4096)
    return "fp8.quantize", {"x": _normal(setting, rows, inner), "granularity": "1x128"}


def test_time(made: Make, setting: Setting, row: Row) -> None:
    """Microseconds, launches, registers and shared memory of each program of a call; TFLOP/s of the whole."""
    name, arguments = made(setting)
    op: kpt_core.Op[..., Any] = kpt_core.get_op(name)
    call = op.bind(**arguments)
    leaves = [getattr(call, each) for each in wanted(op, call)]

    def run() -> None:
        out = op(**arguments)
        first = out[0] if isinstance(out, tuple) else out
        if leaves:
            torch.autograd.grad(first, leaves, torch.ones_like(first))

    with kpt_core.record() as log:
        run()
    row["kernels"] = sorted({f"{each.op}: {each.identity}" for each in log})
    row["programs"] = programs(profiled(run, setting))
    taken = sum(each["us"] * each["launches"] for each in row["programs"])
    flops = op.flops(call) if op.flops is not None else 0
    row["us"], row["flops"] = round(taken, 1), (3 if leaves else 1) * flops
    if taken:
        row["TFLOP/s"] = round(row["flops"] / taken / 1e6, 1)
        row["of_dense"] = round(row["flops"] / taken / 1e6 / _best(setting), 3)


def _best(setting: Setting) -> float:
    """Return the TFLOP/s of a large product of bfloat16: torch's best."""
    return measure_ceilings(setting.device, quick=True).products[torch.bfloat16].rate / 1e12


def profiled(run: Callable[[], object], setting: Setting) -> list[dict[str, Any]]:
    """Return the trace's events of a few calls."""
    for _ in range(_CALLS):
        run()
    setting.wait()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=kinds) as found:
        for _ in range(_CALLS):
            run()
        setting.wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        found.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def programs(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return of each program that ran on the device what a call takes of it, that with the most time first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.setdefault(event["name"], []).append(event)
    rows = []
    for name, runs in found.items():
        told = runs[0].get("args", {})
        rows.append(
            {
                "program": name[:120],
                "us": round(sum(each["dur"] for each in runs) / len(runs), 2),
                "launches": round(len(runs) / _CALLS, 2),
                "registers": told.get("registers per thread"),
                "shared": told.get("shared memory"),
                "blocks_per_sm": told.get("blocks per SM"),
                "occupancy": told.get("est. achieved occupancy %"),
            }
        )
    return sorted(rows, key=lambda each: -each["us"] * each["launches"])
