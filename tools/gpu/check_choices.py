"""A and B in one process, in turn: what was decided without a GPU, measured on one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from check_numbers import TILES, relative, require
from check_times import attention, experts, grouped
from rows import Row
from setting import Setting, need_gpu
from timing import clocked, interleaved, ratio_of
from torch import Tensor

import kpt_core
from kpt_core.contract import load

_SECONDS = 1.5
#: Calls by name, A first.
Sides = dict[str, Callable[[], Tensor]]


def _names(setting: Setting) -> Iterator[tuple[str, Callable[[Setting], Sides]]]:
    yield "loads of grouped_mm: pointers, TMA, TMA and warps of their own", _loads
    for product in ("up", "down"):
        yield f"experts' {product}: pointers, TMA", partial(_product, product)
    yield "causal attention: SDPA, FlexAttention", _attentions
    yield "experts in 8 bits: widened in the kernel, or before", _widened
    yield "experts in 8 bits: activations as they come, rounded", _rounded


PARAMETERS: dict[str, Any] = {"made": _names}


def _loads(setting: Setting) -> Sides:
    from kpt_triton.moe.grouped_mm import forward

    name, arguments = grouped(setting, "moe.grouped_mm")
    call = kpt_core.get_op(name).bind(**arguments)
    tiles = TILES[:2] if not setting.on_gpu else TILES
    return {tile: partial(forward, call._replace(config={"tile": tile})) for tile in tiles}


def _product(product: str, setting: Setting) -> Sides:
    from kpt_triton.moe.experts import forward

    name, arguments = experts(setting)
    call = kpt_core.get_op(name).bind(**{n: t.detach() for n, t in arguments.items()})
    found: dict[str, str] = {}
    for config in load("kpt_triton.moe.configs:experts")(call):
        tile = config.get(product)
        if tile:
            found[tile.replace(" tma", "")] = tile
    pairs = [(plain, f"{plain} tma") for plain in found][-2:]
    return {
        tile: partial(_first, forward, call._replace(config={product: tile})) for pair in pairs for tile in pair
    } or pytest.skip("no tiles to choose from")


def _first(forward: Callable[..., Any], call: Any) -> Tensor:
    out = forward(call)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _attentions(setting: Setting) -> Sides:
    from kpt_attention.torch_kernels import gpu_flex, gpu_sdpa

    name, arguments = attention(setting, "causal")
    call = kpt_core.get_op(name).bind(**{n: t.detach() if isinstance(t, Tensor) else t for n, t in arguments.items()})
    return {"SDPA": lambda: gpu_sdpa.forward(call)[0], "FlexAttention": lambda: gpu_flex.forward(call)[0]}


def _widened(setting: Setting) -> Sides:
    from kpt_triton.moe.grouped_mm import forward as plainly
    from kpt_triton.moe.scaled_grouped_mm import forward as scaled

    need_gpu(setting)
    name, arguments = grouped(setting, "moe.scaled_grouped_mm")
    call = kpt_core.get_op(name).bind(**arguments)

    def before() -> Tensor:
        wide = (call.weight.to(call.x.dtype) * call.scale.to(call.x.dtype)).contiguous()
        plain: Tensor = plainly(kpt_core.get_op("moe.grouped_mm").bind(call.x, wide, call.offsets))
        return plain

    return {"in the kernel": partial(scaled, call), "before it": before}


def _rounded(setting: Setting) -> Sides:
    from kpt_fp8 import quantize_to_fp8
    from kpt_triton.moe.experts import forward

    name, arguments = experts(setting)
    given = {n: t.detach() for n, t in arguments.items()}
    for part in ("gate_up", "down"):
        narrow = quantize_to_fp8(given[f"{part}_proj"], granularity="128x128")
        given |= {f"{part}_proj": narrow.codes, f"{part}_scale": narrow.scale}
    calls = {how: kpt_core.get_op(name).bind(**given, activations=how) for how in ("none", "1x128", "row")}
    return {how: partial(_first, forward, call) for how, call in calls.items()}


def test_choice(made: Callable[[Setting], Sides], setting: Setting, row: Row) -> None:
    """Both give the same, and one is so many times as fast as the other."""
    with torch.no_grad():
        sides = made(setting)
        results = {name: call() for name, call in sides.items()}
        first, *others = sides
        for other in others:
            require(relative(results[other], results[first]) / 2, results[first].dtype, other)
        del results
        times = interleaved(
            [clocked(call, setting.device) for call in sides.values()], _SECONDS if setting.on_gpu else 0.05
        )
    row["sides"] = {
        name: {"ms": round(sorted(own)[len(own) // 2] * 1e3, 4), f"beside {first}": str(ratio_of(times[0], own))}
        for name, own in zip(sides, times, strict=True)
    }
