"""The product behind `fp8.linear` and `fp8.scaled_mm`: the grouped one of kernels for experts, with one group.

It widens 8-bit weights as it reads them, so that a few rows are multiplied at the rate at which memory gives the codes.
"""

from ctypes import addressof, c_int32

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.structures import NO_BIAS, SCALES_BLOCK, SCALES_K, SCALES_N
from kpt_backend_cpu.tensors import DTYPES, address, readable
from kpt_core import Refusal

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Up to so many rows the kernel for few rows serves, which widens each number of them.
_FEW_ROWS = 16
#: What shares a scale of rows in 8 bits, and of the matrix.
OF_ROWS, _OF_MATRIX = ("tensor", "row", "1x128"), ("tensor", "row", "128x128")


def refusal(matrix: Tensor, granularity: str) -> Refusal | None:
    """Return why a matrix is not for these kernels, or None."""
    if matrix.dtype not in FORMATS:
        return Refusal("codes of {dtype}; needs float8_e4m3fn or float8_e5m2", dtype=matrix.dtype)
    if granularity not in _OF_MATRIX:
        return Refusal("scales of the weight by {by}; needs tensor, row or 128x128", by=granularity)
    return None


def multiply(
    op: str,
    x: Tensor,
    matrix: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    x_scale: Tensor | None = None,
    by_output: bool = False,
) -> Tensor:
    """Return `(x * x_scale) @ (matrix * scale) + bias`, summed in float32 and rounded once.

    Args:
        op: what messages name.
        x: `[M, K]` floating, or codes with `x_scale`.
        matrix: `[K, N]` codes, any strides.
        scale: `[]`, `[N]`, `[K, 1]` or one for each block of 128 by 128.
        bias: `[N]` or None.
        dtype: of the result.
        x_scale: `[]`, `[M]` or `[M, ceil(K / 128)]`.
        by_output: `matrix` is `[N, K]`, as layers keep it: to transpose it costs a short call a tenth.
    """
    factor = None
    if x_scale is not None:
        x_scale = x_scale.float()
        if x_scale.dim() < 2:  # what a row shares multiplies its sums
            factor, x_scale = x_scale.expand(len(x)).contiguous(), None
            if len(x) <= _FEW_ROWS:
                x = x.to(torch.bfloat16)  # exactly; few rows are multiplied as they are given
        else:
            x_scale = x_scale.contiguous()
    return _multiply(op, x, matrix, scale, x_scale, factor, bias, dtype, by_output)


def _multiply(
    op: str,
    x: Tensor,
    matrix: Tensor,
    scale: Tensor,
    x_scale: Tensor | None,
    factor: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    by_output: bool,
) -> Tensor:
    """`moe.products.multiply` with one group, without the tensors that it needs for several: they cost a third."""
    x, matrix, scale = readable(op, "x", x), _matrix(op, "the weight", matrix), _matrix(op, "its scale", scale.float())
    (count, inner), columns = x.shape, matrix.shape[0 if by_output else 1]
    out = x.new_empty((count, columns), dtype=out_dtype)
    if out.numel() == 0 or inner == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if bias is not None:
        bias = readable(op, "bias", bias if bias.dtype in DTYPES and bias.itemsize > 1 else bias.float(), whole=True)
    stride_k, stride_n = reversed(matrix.stride()) if by_output else matrix.stride()
    strides = scale.stride()
    if scale.dim() < 2:
        kind, of_k, of_n = SCALES_N, 0, strides[0] if strides else 0
    else:
        kind, (of_k, of_n) = SCALES_K if scale.shape == (inner, 1) else SCALES_BLOCK, strides
    end = c_int32(count)
    native.run(
        "kpt_grouped_mm",
        *(x.data_ptr(), x.stride(0), DTYPES[x.dtype]),
        *(out.data_ptr(), columns, DTYPES[out_dtype]),
        *(matrix.data_ptr(), 0, stride_k, stride_n, DTYPES[matrix.dtype]),
        *(kind, scale.data_ptr(), 0, of_k, of_n),
        *(address(x_scale), 0 if x_scale is None else x_scale.shape[1]),
        *(addressof(end), count, inner, columns, 1, torch.get_num_threads(), address(factor)),
        *(NO_BIAS if bias is None else (bias.data_ptr(), 0, DTYPES[bias.dtype])),
    )
    return out


def _matrix(op: str, name: str, x: Tensor) -> Tensor:
    """Return `x`, or a copy where neither its rows nor its columns are contiguous."""
    return readable(op, name, x.t()).t() if x.dim() == 2 and x.stride(0) == 1 else readable(op, name, x)
