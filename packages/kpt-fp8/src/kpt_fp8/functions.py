"""Quantising and back in one call each, with a tensor type between them."""

import torch
from torch import Tensor

from kpt_core import InputError

from .dequantize import dequantize
from .formats import FORMATS, require_floating, require_fp8
from .fp8_tensor import FP8Tensor
from .quantize import quantize
from .scales import check_granularity, largest, scale_of
from .weights import MXFP8, scale_format


def compute_fp8_scale(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, granularity: str = "row", power_of_two: bool = False
) -> Tensor:
    """Return what `quantize_to_fp8` divides numbers by, to the bit.

    Args:
        x: `[..., K]` (`[..., N, K]` for granularity `128x128`) float64, float32, bfloat16 or float16.
        dtype: of the codes: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
        granularity: what shares a scale: `tensor`, `row`, `1x128`, `128x128`, `1x32`, or `mxfp8`, which is `1x32` with
            scales of float8_e8m0fnu, rounded up.
        power_of_two: round scales up to powers of two. Those of `mxfp8` are so anyway.

    Returns:
        float32 (float8_e8m0fnu for `mxfp8`) of `scale_shape(x.shape, granularity)`.

    Raises:
        InputError: a shape or dtype does not fit.
        UnknownNameError: no such granularity.
    """
    owner = "compute_fp8_scale"
    _require_tensor(owner, x)
    require_floating(owner, "x", x.dtype)
    require_fp8(owner, "dtype", dtype)
    shared, scale_dtype, rounding = scale_format(granularity, power_of_two)
    check_granularity(owner, "x", shared, x.shape)
    return scale_of(largest(x.detach().to(torch.float32), shared), FORMATS[dtype].most, rounding).to(scale_dtype)


def quantize_to_fp8(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "row",
    scale: Tensor | None = None,
    power_of_two: bool = False,
    stochastic: bool = False,
    seed: int = 0,
) -> FP8Tensor:
    """Quantise numbers by op `fp8.quantize`; the result has no gradient.

    Args:
        x: as `compute_fp8_scale` takes it.
        dtype: of the codes.
        granularity: what shares a scale, as `compute_fp8_scale` takes it.
        scale: what to divide by instead of what `compute_fp8_scale` gives.
        power_of_two: round scales up to powers of two; not together with `scale`.
        stochastic: round up or down at random, so that the mean is right.
        seed: of what is drawn.

    Returns:
        The codes with their scale, which stand for a tensor of `x`'s shape and dtype.

    Raises:
        InputError: a shape or dtype does not fit, or both `scale` and `power_of_two` are given.
        UnknownNameError: no such granularity.
    """
    _require_tensor("quantize_to_fp8", x)
    shared, scale_dtype, rounding = scale_format(granularity, power_of_two)
    if scale is not None:
        _require_exponents("quantize_to_fp8", granularity, scale)
    if scale is not None and power_of_two:
        raise InputError(
            "quantize_to_fp8: power_of_two is for scales that are computed; got a scale too: leave one of them out"
        )
    codes, own = quantize(
        x.detach(),
        scale,
        dtype=dtype,
        granularity=shared,
        scale_dtype=scale_dtype,
        scale_rounding=rounding,
        stochastic=stochastic,
        seed=seed,
    )
    return FP8Tensor(codes, own, shared, x.dtype)


def dequantize_from_fp8(
    codes: FP8Tensor | Tensor,
    scale: Tensor | None = None,
    granularity: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the numbers that codes and their scale stand for, by op `fp8.dequantize`.

    Args:
        codes: an `FP8Tensor`, which has its own scale and granularity; or codes `[..., K]` of an 8-bit format.
        scale: of plain codes, of `scale_shape(codes.shape, granularity)`.
        granularity: of plain codes, as `compute_fp8_scale` takes it; None is `row`.
        dtype: of the result; None is what an `FP8Tensor` stands for, and float32 for plain codes.

    Raises:
        InputError: a shape or dtype does not fit, plain codes have no scale, or an `FP8Tensor` is given another one.
        UnknownNameError: no such granularity.
    """
    if isinstance(codes, FP8Tensor):
        if scale is not None or granularity is not None:
            raise InputError(
                "dequantize_from_fp8: an FP8Tensor has its own scale and granularity; got others too: leave them out, "
                "or pass tensor.codes"
            )
        return codes.dequantize(dtype)
    _require_tensor("dequantize_from_fp8", codes, "codes")
    if scale is None:
        raise InputError(
            f"dequantize_from_fp8: plain codes need their scale; got none for {codes.dtype} {list(codes.shape)}: "
            "pass it"
        )
    _require_exponents("dequantize_from_fp8", granularity or "row", scale)
    shared, _, _ = scale_format(granularity or "row", False)
    return dequantize(codes, scale, granularity=shared, dtype=dtype or torch.float32)


def _require_tensor(owner: str, x: object, name: str = "x") -> None:
    if not isinstance(x, Tensor) or isinstance(x, FP8Tensor):
        already = " (already quantised): call .dequantize() on it first" if isinstance(x, FP8Tensor) else ""
        raise InputError(
            f"{owner}: {name} must be a tensor; got {type(x).__name__}{already or ': call torch.tensor on it'}"
        )


def _require_exponents(owner: str, granularity: str, scale: Tensor) -> None:
    if granularity == MXFP8 and scale.dtype is not torch.float8_e8m0fnu:
        raise InputError(
            f"{owner}: scales of mxfp8 are powers of two of float8_e8m0fnu; got {scale.dtype}: give granularity='1x32' "
            "for other scales"
        )
