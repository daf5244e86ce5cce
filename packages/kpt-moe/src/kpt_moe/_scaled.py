"""Products with 8-bit weights: dequantising one expert, or a bounded workspace of them, at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._accelerators import _chunks
from ._loops import _library, segments

#: What weights may be quantised to.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES_OF_FLOAT8 = "float8_e4m3fn or float8_e5m2"
#: What scales may be: float32, and float64 where all is widened to that.
SCALE_DTYPES = (torch.float32, torch.float64)
#: Rows and columns that share one scale in blockwise scales.
SCALE_BLOCK = 128

_library.define(
    "scaled_grouped_mm(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale, Tensor offsets, ScalarType out_dtype) "
    "-> Tensor"
)


def in_blocks(*sizes: int) -> list[int]:
    """How many blocks each of these sizes has."""
    return [-(-size // SCALE_BLOCK) for size in sizes]


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """What products of these dtypes are summed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times their scales.

    Args:
        codes: `[..., K, N]` of a float8 dtype.
        scale: `[..., a, b]` with the same leading dimensions; `a` is 1, K or the number of blocks in K, and so is `b`
            for N.
        dtype: float32 or float64.

    Returns:
        `[..., K, N]` of `dtype`, in the memory order of `codes`.
    """
    values = codes.to(dtype)
    scale = _spread_columns(scale, codes.shape[-1])
    rows = codes.shape[-2]
    if scale.shape[-2] in (1, rows):
        return values.mul_(scale)
    whole = rows // SCALE_BLOCK
    blocks, rest = values.split_with_sizes([whole * SCALE_BLOCK, rows % SCALE_BLOCK], dim=-2)
    blocks.unflatten(-2, (whole, SCALE_BLOCK)).mul_(scale[..., :whole, :].unsqueeze(-2))
    rest.mul_(scale[..., -1:, :])
    return values


def _spread_columns(scale: Tensor, columns: int) -> Tensor:
    """`[..., a, 1 or columns]` of `[..., a, b]`."""
    if scale.shape[-1] in (1, columns):
        return scale
    return scale.repeat_interleave(SCALE_BLOCK, dim=-1, output_size=scale.shape[-1] * SCALE_BLOCK)[..., :columns]


class DequantisedMatrices:
    """`weight[expert]` of quantised weights in host memory: one matrix in one buffer, until another one is asked for.

    Args:
        weight: `[num_experts, K, N]` of a float8 dtype.
        scale: `[num_experts, a, b]`, as `dequantise` takes it.
        dtype: of the matrices.
    """

    def __init__(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self._transposed = weight.stride(1) < weight.stride(2)
        self._codes, self._scale = (weight.mT, scale.mT) if self._transposed else (weight, scale)
        self._matrix = torch.empty(self._codes.shape[1:], dtype=dtype, device=weight.device)
        self._expert = -1
        # A table of all codes: conversion takes several times longer (5 ns an element in torch 2.13).
        codes = torch.arange(256, dtype=torch.uint8, device=weight.device).view(weight.dtype)
        self._values = codes.to(wide_dtype(dtype))

    def __getitem__(self, expert: int) -> Tensor:
        """`[K, N]`; the next call for another expert overwrites it."""
        if expert != self._expert:
            self._read(self._codes[expert], self._scale[expert])
            self._expert = expert
        return self._matrix.t() if self._transposed else self._matrix

    def _read(self, codes: Tensor, scale: Tensor) -> None:
        rows = codes.shape[0]
        scale = _spread_columns(scale, codes.shape[1])
        # A block of rows at a time stays in cache.
        for block, start in enumerate(range(0, rows, SCALE_BLOCK)):
            part = codes[start : start + SCALE_BLOCK]
            values = self._values.index_select(0, part.view(torch.uint8).flatten().int()).view(part.shape)
            if scale.shape[0] == rows:
                own = scale[start : start + SCALE_BLOCK]
            else:
                own = scale[0 if scale.shape[0] == 1 else block]
            self._matrix[start : start + SCALE_BLOCK] = values.mul_(own)


def matrices(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor | DequantisedMatrices:
    """What gives an expert's matrix `[K, N]` in `dtype` if indexed by the expert: unscaled weights do so themselves."""
    return weight if scale is None else DequantisedMatrices(weight, scale, dtype)


def _widen(x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if x_scale is None else x * _spread_columns(x_scale, x.shape[1])


@torch.library.impl(_library, "scaled_grouped_mm", "CPU")
def _scaled_grouped_mm_on_host(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2], dtype=out_dtype)
    wide = wide_dtype(x.dtype, out_dtype)
    matrix = DequantisedMatrices(weight, scale, wide)
    end = 0
    with torch.no_grad():
        for expert, start, end in segments(offsets):
            own = None if x_scale is None else x_scale[start:end]
            out[start:end] = _widen(x[start:end], own, wide) @ matrix[expert]
        out[end:].zero_()
    return out


@torch.library.impl(_library, "scaled_grouped_mm", "CompositeExplicitAutograd")
def _scaled_grouped_mm(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    rows, inner, columns = x.shape[0], *weight.shape[1:]
    wide = wide_dtype(x.dtype, out_dtype)
    out = x.new_zeros(rows + 1, columns, dtype=out_dtype)  # the last row takes what no row owns
    if rows > 0:
        x = _widen(x, x_scale, wide)
        for expert, row, taken in _chunks(rows, offsets, inner * columns * wide.itemsize):
            matrix = dequantise(weight.index_select(0, expert), scale.index_select(0, expert), wide)
            y = torch.bmm(torch.where(taken.unsqueeze(-1), x[row], 0), matrix).to(out_dtype)
            out.index_copy_(0, torch.where(taken, row, rows).flatten(), y.flatten(0, 1))
    return out[:rows]


@torch.library.register_fake("kpt_moe::scaled_grouped_mm", lib=_library)  # type: ignore[untyped-decorator]
def _scaled_grouped_mm_fake(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2], dtype=out_dtype)


def scaled_grouped_mm(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """`moe.scaled_grouped_mm` with a scale of three dimensions and without gradients."""
    return torch.ops.kpt_moe.scaled_grouped_mm.default(  # type: ignore[no-any-return]
        x, weight, scale, x_scale, offsets, out_dtype
    )


def scale_of_stored(scale: Tensor | None, transposed: bool) -> Tensor | None:
    """The scale `[num_experts, a, b]` of weights `[num_experts, K, N]`, from that of stored weights.

    Args:
        scale: `[num_experts, outputs]`, or blocks in the order of the stored matrices.
        transposed: these are stored as input by output.
    """
    if scale is None:
        return None
    if scale.dim() == 2:
        return scale.unsqueeze(1)
    return scale if transposed else scale.mT


def one_of(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as a message lists them."""
    *others, last = dict.fromkeys(str(list(shape)) for shape in shapes)
    return f"{', '.join(others)} or {last}" if others else last
