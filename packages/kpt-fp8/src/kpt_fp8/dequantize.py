"""The numbers that 8-bit codes and their scale stand for: op `fp8.dequantize`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, op

from .formats import require_floating, require_fp8
from .scales import check_granularity, check_scale, tiled

_NAME = "fp8.dequantize"


def _check(call: Call) -> None:
    require_floating(_NAME, "dtype", call.dtype)
    check_quantized(_NAME, "codes", call.codes, call.scale, call.granularity)


def check_quantized(op: str, name: str, codes: Tensor, scale: Tensor, granularity: str, scale_name: str = "") -> None:
    """Raise unless codes and scale belong together."""
    scale_name = scale_name or "scale"
    require_fp8(op, name, codes.dtype)
    check_granularity(op, name, granularity, codes.shape)
    check_scale(op, scale_name, scale, codes.shape, granularity)
    if codes.device != scale.device:
        raise InputError(f"{op}: {name} is on {codes.device}, but {scale_name} on {scale.device}: move one of them")
    for each, tensor in ((name, codes), (scale_name, scale)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{op}: {each} is quantised or scales what is, and has no gradient; got requires_grad=True: call "
                "requires_grad_(False) on it"
            )


def _fake(call: Call) -> Tensor:
    return call.codes.new_empty(call.codes.shape, dtype=call.dtype)  # type: ignore[no-any-return]


@op(_NAME, check=_check, fake=_fake)
def dequantize(
    codes: Tensor, scale: Tensor, *, granularity: str = "tensor", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `codes * scale`, multiplied in float32 (float64 for that) and rounded to `dtype`.

    Every bit is specified, but for those of a NaN. Where the product leaves the range of float32 it is infinite.

    Args:
        codes: `[..., K]` (`[..., N, K]` for granularity `128x128`) of an 8-bit format.
        scale: of `scale_shape(codes.shape, granularity)`, float32, float64 or float8_e8m0fnu.
        granularity: what shares a scale: `tensor`, `row`, `1x128`, `128x128` or `1x32`.
        dtype: of the result: float64, float32, bfloat16 or float16.

    Returns:
        `[..., K]` of `dtype`, contiguous. It has no gradient.

    Raises:
        InputError: a shape, dtype or device does not fit.
        UnknownNameError: no such `granularity`.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    numbers, own = tiled(codes.to(wide), scale.to(wide), granularity)
    return (numbers * own).reshape(codes.shape).to(dtype).contiguous()
