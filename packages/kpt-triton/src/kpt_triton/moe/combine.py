"""Summing rows that lie sorted by expert: those of a token (`combine`), and those of an expert (`segment_sum`).

Each result is summed in float32 in one order and written once, so results never depend on scheduling. Grids depend on
shapes alone and nothing is read on the host, so a call can be captured in a CUDA graph.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.launching import inner_contiguous
from kpt_triton.numeric import narrow

#: Columns of a token that a program sums: 16 bytes of bfloat16 for each of 128 threads.
_COLUMNS = 1024
#: Rows of one expert that a program sums, how many at a time, and columns.
_CHUNK, _ROWS, _WIDTH = 512, 16, 128
#: Chunks of one expert that are summed at a time.
_PARTS = 16


@triton.jit
def _combine_kernel(
    rows, position, offsets, weights, out, width, row_stride, num_experts,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offsets + num_experts - 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(position + token * TOP_K + choice)
        known = row < end
        mask = columns < tl.where(known, width, 0)
        value = tl.load(rows + row.to(tl.int64) * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            # Masked too: a weight of no expert may be NaN.
            value *= tl.load(weights + token * TOP_K + choice, mask=known, other=0.0).to(tl.float32)
        total += value
    tl.store(out + token * width + columns, narrow(total, out.dtype.element_ty), mask=columns < width)


@triton.jit
def _rows_of_experts(offsets, num_experts, EXPERTS: tl.constexpr):
    """Each expert's first row, and its end; for experts that there are not, none."""
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    first = tl.load(offsets + experts - 1, mask=known & (experts > 0), other=0)
    return first, tl.load(offsets + experts, mask=known, other=0)


@triton.jit
def _chunk_sum_kernel(
    rows, offsets, weights, parts, width, row_stride, num_experts,
    WEIGHTED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The sum of one chunk of an expert's rows; the grid has a program for as many chunks as there can be."""
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first, end = _rows_of_experts(offsets, num_experts, EXPERTS)
    chunks = (end - first + CHUNK - 1) // CHUNK
    last = tl.cumsum(chunks, 0)
    owner = tl.arange(0, EXPERTS) == tl.sum((last <= chunk).to(tl.int32), 0)
    # Zero where chunk and owner are none.
    start = tl.sum(tl.where(owner, first + (chunk - last + chunks) * CHUNK, 0), 0)
    stop = tl.minimum(start + CHUNK, tl.sum(tl.where(owner, end, 0), 0))
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in range(start, stop, ROWS):
        row = step + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (columns < width)[None, :]
        value = tl.load(rows + row.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + row, mask=row < stop, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(parts + chunk.to(tl.int64) * width + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _expert_sum_kernel(
    parts, offsets, out, width, num_experts,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The sum of an expert's chunks."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first, end = _rows_of_experts(offsets, num_experts, EXPERTS)
    chunks = (end - first + CHUNK - 1) // CHUNK
    start = tl.sum(tl.where(tl.arange(0, EXPERTS) < expert, chunks, 0), 0)
    stop = tl.sum(tl.where(tl.arange(0, EXPERTS) <= expert, chunks, 0), 0)
    total = tl.zeros((PARTS, WIDTH), tl.float32)
    for step in range(start, stop, PARTS):
        part = step + tl.arange(0, PARTS)
        inside = (part < stop)[:, None] & (columns < width)[None, :]
        total += tl.load(parts + part.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0)
    value = narrow(tl.sum(total, 0), out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * width + columns, value, mask=columns < width)


def combine(
    rows: Tensor, position: Tensor, offsets: Tensor, weights: Tensor | None, top_k: int, dtype: torch.dtype
) -> Tensor:
    """Sum the rows of each token, in the order of its choices.

    Args:
        rows: `[R, D]` float32, bfloat16 or float16, sorted by expert. Rows at and past `offsets[-1]` are not read.
        position: `[T * top_k]` int32, the row of each pair.
        offsets: `[E]` int32, the end row of each expert.
        weights: `[T, top_k]` of any of these dtypes, what rows are multiplied by; None for nothing. Weights of pairs
            past `offsets[-1]` are not read.
        top_k: choices of a token.
        dtype: of the result.

    Returns:
        `[T, D]`: `out[t] = sum_k weights[t, k] * rows[position[t * top_k + k]]`, computed in float32 and rounded once.
        Zero for tokens without rows.
    """
    tokens, width = position.shape[0] // top_k, rows.shape[1]
    out = rows.new_empty(tokens, width, dtype=dtype)
    if out.numel() > 0:
        rows = inner_contiguous(rows)
        # An argument that is not read still has to be a tensor.
        factors = position if weights is None else weights.contiguous()
        launch = _combine_launch(top_k, weights is not None, width)
        _combine_kernel[tokens, triton.cdiv(width, launch["COLUMNS"])](
            rows, position, offsets, factors, out, width, rows.stride(0), offsets.shape[0], **launch
        )
    return out


def segment_sum(
    rows: Tensor, offsets: Tensor, weights: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sum the rows of each expert: the gradient of its bias.

    An expert's rows are summed in chunks of 512, side by side, and then its chunks: one that has most of the rows does
    not keep the others waiting.

    Args:
        rows: `[R, N]` float32, bfloat16 or float16, sorted by expert. Rows at and past `offsets[-1]` are not read.
        offsets: `[E]` int32, the end row of each expert; non-decreasing.
        weights: `[R]` of any of these dtypes, what rows are multiplied by; None for nothing.
        dtype: of the result.

    Returns:
        `[E, N]`, computed in float32 and rounded once; zero for experts without rows.
    """
    num_experts, width = offsets.shape[0], rows.shape[1]
    out = rows.new_empty(num_experts, width, dtype=dtype)
    if width > 0:
        rows = inner_contiguous(rows)
        factors = offsets if weights is None else weights.contiguous()
        chunks = rows.shape[0] // _CHUNK + num_experts
        parts = rows.new_empty(chunks, width, dtype=torch.float32)
        blocks = triton.cdiv(width, _WIDTH)
        _chunk_sum_kernel[chunks, blocks](
            rows, offsets, factors, parts, width, rows.stride(0), num_experts,
            **_chunk_launch(num_experts, weights is not None),
        )  # fmt: skip
        _expert_sum_kernel[num_experts, blocks](parts, offsets, out, width, num_experts, **_expert_launch(num_experts))
    return out


_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def _combine_launch(top_k: int, weighted: bool, width: int) -> dict[str, Any]:
    columns = min(_COLUMNS, max(128, triton.next_power_of_2(width)))
    return {"TOP_K": top_k, "WEIGHTED": weighted, "COLUMNS": columns, **_OPTIONS}


def _chunk_launch(num_experts: int, weighted: bool) -> dict[str, Any]:
    return {
        "WEIGHTED": weighted, "CHUNK": _CHUNK, "ROWS": _ROWS, "WIDTH": _WIDTH,
        "EXPERTS": triton.next_power_of_2(num_experts), **_OPTIONS,
    }  # fmt: skip


def _expert_launch(num_experts: int) -> dict[str, Any]:
    experts = triton.next_power_of_2(num_experts)
    return {"CHUNK": _CHUNK, "PARTS": _PARTS, "WIDTH": _WIDTH, "EXPERTS": experts, **_OPTIONS}


_EXPERTS = (128, 1024)


def _combinations(weighted: bool) -> Mapping[str, Mapping[str, Any]]:
    return {f"top-{top_k}, {width} columns": _combine_launch(top_k, weighted, width)
            for top_k, width in ((2, 1024), (8, 1024), (8, 512), (16, 1024))}  # fmt: skip


def _chunk_launches(weighted: bool) -> Mapping[str, Mapping[str, Any]]:
    return {f"{experts} experts": _chunk_launch(experts, weighted) for experts in _EXPERTS}


def _programs(dtype: str, weights: str) -> tuple[Program, ...]:
    weighted = weights != ""
    what = f"{dtype}, weights {weights}" if weighted else dtype
    return (
        Program(
            name=f"combine {what}",
            function=_combine_kernel,
            signature={
                **dict.fromkeys(("rows", "out"), f"*{dtype}:16"),
                **dict.fromkeys(("position", "offsets"), "*i32:16"),
                "weights": f"*{weights or 'i32'}:16",
                **dict.fromkeys(("width", "row_stride"), "i32:16"),
                "num_experts": "i32",
            },
            contracts=NO_SPILLS,
            launches=lambda chip: _combinations(weighted),
        ),
        Program(
            name=f"segment_sum of chunks {what}",
            function=_chunk_sum_kernel,
            signature={
                "rows": f"*{dtype}:16",
                "offsets": "*i32:16",
                "weights": f"*{weights or 'i32'}:16",
                "parts": "*fp32:16",
                **dict.fromkeys(("width", "row_stride"), "i32:16"),
                "num_experts": "i32",
            },
            contracts=NO_SPILLS,
            launches=lambda chip: _chunk_launches(weighted),
        ),
    )


def _expert_program(dtype: str) -> Program:
    return Program(
        name=f"segment_sum of experts {dtype}",
        function=_expert_sum_kernel,
        signature={
            "parts": "*fp32:16",
            "offsets": "*i32:16",
            "out": f"*{dtype}:16",
            "width": "i32:16",
            "num_experts": "i32",
        },
        contracts=NO_SPILLS,
        launches=lambda chip: {f"{experts} experts": _expert_launch(experts) for experts in _EXPERTS},
    )


#: What is compiled ahead of time.
AOT = (
    *(
        program
        for dtype in ("bf16", "fp16", "fp32")
        for weights in ("", "fp32")
        for program in _programs(dtype, weights)
    ),
    *(_expert_program(dtype) for dtype in ("bf16", "fp16", "fp32")),
)
