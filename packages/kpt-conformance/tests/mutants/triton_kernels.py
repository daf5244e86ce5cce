"""Faults in a grouped product in Triton, which run where Triton interprets kernels: `TRITON_INTERPRET=1`.

The fault is a constant of the kernel: each variant is what one slip of the hand leaves of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kpt_conformance.interpreter import prepare_once

from .grouped_mm import past
from .mutant import Functions, Mutant

prepare_once()
M, N, K = 16, 16, 16


@triton.jit
def _grouped(
    x, w, out, offsets, inner, columns, stride_xr, stride_xk, stride_we, stride_wk, stride_wn, stride_or,
    FAULT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for each expert and tile of columns, all of the expert's rows in turn."""
    # The last expert first: what one leaves in the rows of the next is not mended in turn.
    expert = tl.num_programs(0) - 1 - tl.program_id(0)
    if FAULT == "aligned":
        expert = tl.program_id(0)
    tile_n = tl.program_id(1)
    if FAULT == "odd tile":
        tile_n = tile_n // 2 * 2
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if FAULT == "aligned":
        start = start // 8 * 8
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    for first in range(start, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        taken = row < end
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float16 if FAULT == "half" else tl.float32)
        if FAULT == "second tile":
            taken = taken & (row < start + 2 * BLOCK_M - 1)
        stop = inner // BLOCK_K * BLOCK_K if FAULT == "tail of K" else inner
        for k in range(0, stop, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            known = at < inner
            if FAULT == "K wraps":
                at = at % inner
                known = at >= 0
            if FAULT == "int32":
                place = row * stride_xr  # wraps around; kept inside of the memory, so that the process lives
                places = tl.where(place < 0, 0, place)[:, None] + at[None, :] * stride_xk
            elif FAULT == "inner stride":
                places = row.to(tl.int64)[:, None] * stride_xr + at[None, :]
            else:
                places = row.to(tl.int64)[:, None] * stride_xr + at.to(tl.int64)[None, :] * stride_xk
            x_tile = tl.load(x + places, mask=taken[:, None] & known[None, :], other=1.0 if FAULT == "other" else 0.0)
            matrix = w + expert.to(tl.int64) * stride_we
            if FAULT == "transposed":
                matrix += at[:, None] * columns + column[None, :]
            else:
                matrix += at.to(tl.int64)[:, None] * stride_wk + column.to(tl.int64)[None, :] * stride_wn
            mask = inside[None, :] if FAULT == "other" else known[:, None] & inside[None, :]
            w_tile = tl.load(tl.where(mask & known[:, None], matrix, w), mask=mask, other=0.0)
            part = tl.dot(x_tile.to(tl.float32), w_tile.to(tl.float32), input_precision="ieee")
            acc = (acc + part).to(acc.dtype)
        written = taken[:, None] & inside[None, :]
        if FAULT == "rows unmasked":
            written = (row >= 0)[:, None] & inside[None, :]
        if FAULT == "columns unmasked":
            written = taken[:, None] & (column >= 0)[None, :]
        place = out + row.to(tl.int64)[:, None] * stride_or + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=written)


def kernel(fault: str = "") -> Callable[[], Functions]:
    """A maker of a forward with a fault, or none."""

    def forward(call: Any) -> torch.Tensor:
        x, weight = call.x, call.weight
        rows, columns = x.shape[0], weight.shape[2]
        # Room behind the result, for what a fault writes there.
        memory = x.new_zeros(rows * columns + M * columns + M * N)
        if fault == "empty":
            memory.fill_(7)
        out = memory[: rows * columns].view(rows, columns)
        experts = min(weight.shape[0], 32) if fault == "32 groups" else weight.shape[0]
        if out.numel() and experts:
            _grouped[(experts, triton.cdiv(columns, N))](
                x, weight, out, call.offsets.contiguous(), x.shape[1], columns, *x.stride(), *weight.stride(),
                out.stride(0), FAULT=fault, BLOCK_M=M, BLOCK_N=N, BLOCK_K=K,
            )  # fmt: skip
        return out.clone()

    return lambda: (forward,)


def _small(trial: Any) -> bool:
    return "63 rows" in trial.case.name


def _nobody(trial: Any) -> bool:
    return "rows of nobody" in trial.case.name


def _half(trial: Any) -> bool:
    return trial.dtype is torch.float16 and past(inner=128)(trial)


MUTANTS = [
    Mutant(name, "moe.grouped_mm", found_by, kernel(fault), {"dtypes": {"float32", "float16"}}, at)
    for fault, name, found_by, at in (
        ("tail of K", "Triton: the last tile of K is left out", "values", _small),
        ("K wraps", "Triton: the last tile of K begins anew instead of being masked", "values", _small),
        ("other", "Triton: x is one outside of K, and the weight is not masked", "values", _small),
        ("columns unmasked", "Triton: the last tile of columns is stored without a mask", "values", _small),
        ("odd tile", "Triton: an odd tile of columns is the even one again", "values", _small),
        ("rows unmasked", "Triton: the last tile of rows is stored without a mask", "values", _nobody),
        ("aligned", "Triton: an expert's first row is rounded down to eight", "values", _small),
        ("second tile", "Triton: the second tile of rows lacks its last row", "values", past(rows=32)),
        ("half", "Triton: the accumulator is of half precision", "values", _half),
        ("32 groups", "Triton: groups past the thirty-second are not launched", "values", past(groups=32)),
        ("int32", "Triton: offsets of rows are of 32 bits", "far_strides", _small),
        ("inner stride", "Triton: the inner stride of x is taken for one", "layouts", _small),
        ("transposed", "Triton: the weight is taken for stored as KN", "layouts", _small),
        ("empty", "Triton: rows of nobody are never written", "values", _nobody),
    )
]  # fmt: skip
