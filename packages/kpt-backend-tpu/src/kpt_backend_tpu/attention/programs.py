"""List what the kernel is compiled for ahead of time, and what its code must be, chip by chip."""

from functools import partial
from typing import Any

from kpt_backend_tpu.chips import CHIPS
from kpt_backend_tpu.layouts import Scores
from kpt_backend_tpu.programs import Arguments, Program
from kpt_backend_tpu.tiles import BLOCK

#: Half of what XLA gives a kernel of a core's VMEM; and how many bytes may go there for lack of registers, over the
#: whole code of a program, of which the backward has two kernels: a tile's scores are more than all registers hold.
_CONTRACT = "mosaic, mxu of {dtype}, spills <= {spills} KiB, vmem <= {vmem} MiB"
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}

#: Causality alone; a step of decoding under a window; and bits of blocks, where no size is a multiple of anything.
_SIZES: dict[str, dict[str, Any]] = {
    "prefill": {"queries": 4096, "keys": 4096, "heads": 32, "kv_heads": 8, "dims": (128, 128), "mask": "causal"},
    "decode": {"queries": 1, "keys": 8191, "heads": 32, "kv_heads": 8, "dims": (64, 64), "mask": "intervals"},
    "odd": {"queries": 1001, "keys": 777, "heads": 6, "kv_heads": 2, "dims": (80, 72), "mask": "blocks"},
}


def _dense(
    dtype: str,
    backward: bool,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    mask: str,
) -> Arguments:
    batch, (head_dim, value_dim) = 2, dims
    q, k = (dtype, batch, heads, queries, head_dim), (dtype, batch, kv_heads, keys, head_dim)
    out = (dtype, batch, heads, queries, value_dim)
    intervals = ("int32", batch, 1, queries, 2, 2) if mask == "intervals" else None
    tiles = -(-queries // BLOCK), -(-keys // BLOCK)
    blocks = (("int32", 1, heads, *tiles), ("uint8", 40, BLOCK, BLOCK // 8)) if mask == "blocks" else (None, None)
    sinks = ("float32", heads) if mask == "intervals" else None
    given = (q, k, (*k[:4], value_dim), intervals, *blocks, sinks, ("int32", 1))
    static: dict[str, Any] = {"scores": Scores(mask == "causal", 0.1, 30.0 if mask == "blocks" else 0.0)}
    if not backward:
        return given, static
    row = ("float32", batch, heads, queries)
    needs = ("q", "k", "v", *(("sinks",) if sinks else ()))
    return (*given, out, row, row, out, row), {**static, "needs": needs}


def _contract(dtype: str, chip: str) -> str:
    return _CONTRACT.format(dtype=dtype, spills=12288, vmem=8)


dense = tuple(
    Program(
        name=f"{name} {short}",
        function=f"attention:{name}",
        sizes=_SIZES,
        arguments=partial(_dense, dtype, name == "backward"),
        contracts={chip: _contract(short, chip) for chip in CHIPS},
    )
    for short, dtype in _DTYPES.items()
    for name in ("forward", "backward")
)

#: Pages of vLLM's and of flash-attention's size, and sizes that are no multiple of anything.
_PAGES: dict[str, dict[str, Any]] = {
    "decode": {"batch": 16, "heads": 32, "kv_heads": 8, "dims": (128, 128), "size": 16, "most": 512},
    "long": {"batch": 8, "heads": 64, "kv_heads": 8, "dims": (64, 64), "size": 128, "most": 256},
    "odd": {"batch": 3, "heads": 6, "kv_heads": 2, "dims": (80, 72), "size": 24, "most": 7},
}


def _paged(
    dtype: str, cache: str, batch: int, heads: int, kv_heads: int, dims: tuple[int, int], size: int, most: int
) -> Arguments:
    pages = (cache, batch * most // 2, size, kv_heads)
    scales = ("float32", kv_heads) if cache != dtype else None
    given = (
        (dtype, batch, heads, dims[0]), (*pages, dims[0]), (*pages, dims[1]), ("int32", batch, most), ("int32", batch),
        ("float32", heads), scales, scales,
    )  # fmt: skip
    return given, {"window": 100 if size == 24 else 0, "scores": Scores(True, 0.1, 30.0 if size == 24 else 0.0)}


paged = tuple(
    Program(
        name=f"forward {short}{' of 8 bits' if cache else ''}",
        function="paged:decode",
        sizes=_PAGES,
        arguments=partial(_paged, dtype, cache or dtype),
        contracts={chip: _CONTRACT.format(dtype=short, spills=8192, vmem=8) for chip in CHIPS},
    )
    for short, dtype in _DTYPES.items()
    for cache in ("", "float8_e4m3fn")
)
