"""Matrices of 8-bit weights in host memory, dequantised one at a time."""

import torch
from torch import Tensor

from kpt_moe._dtypes import wide_dtype
from kpt_moe._scales import SCALE_BLOCK, spread


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
        scale = spread(scale, codes.shape[1], -1)
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
