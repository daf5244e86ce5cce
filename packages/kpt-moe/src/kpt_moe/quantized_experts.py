"""Quantising the weights of experts to 8-bit floating-point numbers and scales."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError

from ._checks import require_known
from ._dtypes import DTYPES, FLOAT8, NAMES_OF_DTYPES, NAMES_OF_FLOAT8, wide_dtype
from ._scales import SCALE_BLOCK, in_blocks

#: The schemes of `quantize_weights`.
SCHEMES = ("row", "128x128")


def quantize_weights(
    weight: Tensor, scheme: str = "row", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantise matrices so that the greatest number under each scale becomes the greatest that the dtype has.

    Numbers are divided by their scale in float32 (float64 for float64), rounded to nearest even, and saturate. In
    float8_e4m3fn a number is off by at most 2^-4 of itself (2^-3 in float8_e5m2), or by 2^-10 (2^-17) of its scale
    where that is more. One expert is quantised at a time: the memory needed beside the result is that of one matrix.

    Args:
        weight: `[num_experts, outputs, inputs]` of float64, float32, bfloat16 or float16; pass `w.mT` for matrices
            stored as input by output.
        scheme: `row`, one scale for each output channel, or `128x128`, one for each block of 128 by 128 (DeepSeek-V3).
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        The quantised weights, contiguous, of `weight`'s shape, and their float32 scales: `[num_experts, outputs]` or
        `[num_experts, ceil(outputs / 128), ceil(inputs / 128)]`. `weight` is about `quantised * scale`. Where all is
        zero the scale is 1.

    Raises:
        InputError: `weight` has another shape or dtype, holds NaN or infinity, or numbers whose scale float32 can't
            hold; or `dtype` is none of the two.
        UnknownNameError: no such scheme.

    Source: DeepSeek-V3 (arXiv:2412.19437); the formats are those of arXiv:2209.05433.
    """
    require_known("scheme", scheme, SCHEMES)
    if dtype not in FLOAT8:
        raise InputError(f"quantize_weights: dtype must be {NAMES_OF_FLOAT8}; got {dtype}")
    if weight.dim() != 3 or weight.dtype not in DTYPES:
        raise InputError(
            f"quantize_weights: weight must be [num_experts, outputs, inputs] of {NAMES_OF_DTYPES}; "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    weight = weight.detach()
    quantised = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.ones(scale_shape(weight.shape, scheme), dtype=torch.float32, device=weight.device)
    if weight.numel() == 0:
        return quantised, scale
    for codes, scales, matrix in zip(quantised, scale, weight, strict=True):
        _quantize_matrix(matrix, codes, scales)
    if scale.device.type != "meta" and not bool(scale.isfinite().all()):
        experts = (~scale.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise InputError(
            f"quantize_weights: weight must hold finite numbers, whose scales float32 can hold; got others in experts "
            f"{experts}: repair those, or keep them unquantised"
        )
    return quantised, scale


def scale_shape(shape: torch.Size, scheme: str) -> list[int]:
    """The shape of the scales of matrices `[num_experts, outputs, inputs]`."""
    num_experts, outputs, inputs = shape
    return [num_experts, outputs] if scheme == "row" else [num_experts, *in_blocks(outputs, inputs)]


def _quantize_matrix(matrix: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Quantise `[outputs, inputs]` into given codes and scales."""
    wide = matrix.to(wide_dtype(matrix.dtype))
    outputs, inputs = wide.shape
    blocks = scale.dim() == 2
    height, width = (SCALE_BLOCK, SCALE_BLOCK) if blocks else (1, inputs)
    # Zeros change no maximum.
    tiles = F.pad(wide, (0, -inputs % width, 0, -outputs % height)).unflatten(1, (-1, width)).unflatten(0, (-1, height))
    most = torch.finfo(codes.dtype).max
    amax = tiles.abs().amax((1, 3))
    # At least a normal number: by less than that, a quotient would be infinite.
    own = torch.where(amax == 0, 1, (amax / most).clamp(min=torch.finfo(torch.float32).tiny)).float()
    scale.copy_(own if blocks else own.squeeze(1))
    quotients = (tiles / own[:, None, :, None]).clamp_(-most, most).flatten(2).flatten(0, 1)
    codes.copy_(quotients[:outputs, :inputs])
