"""The product behind `fp8.linear` and `fp8.scaled_mm`: the grouped one of kernels for experts, with one group.

It widens 8-bit weights as it reads them, so that a few rows are multiplied at the rate at which memory gives the codes.
"""

import torch
from torch import Tensor

from kpt_backend_cpu.moe import products
from kpt_backend_cpu.moe.tensors import readable
from kpt_core import Refusal

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
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
    """
    factor = None
    if x_scale is not None:
        x_scale = x_scale.float()
        if x_scale.dim() < 2:
            # What a row shares multiplies its sums; bfloat16 holds 8-bit numbers exactly, and has the fastest products.
            x, factor, x_scale = x.to(torch.bfloat16), x_scale.view(-1, 1), None
        else:
            x_scale = x_scale.contiguous()
    scale = scale.float()
    if scale.dim() == 0:
        scale = scale.expand(matrix.shape[1])
    product = products.multiply(
        op,
        readable(op, "x", x),
        readable(op, "the weight", matrix[None]),
        torch.tensor([x.shape[0]], dtype=torch.int32),
        dtype if bias is None and factor is None else torch.float32,
        scale=readable(op, "its scale", scale[None]),
        x_scale=x_scale,
    )
    if factor is not None:
        product.mul_(factor)
    if bias is not None:
        product.add_(bias)
    return product.to(dtype)
