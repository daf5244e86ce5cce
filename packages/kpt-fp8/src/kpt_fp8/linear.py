"""A linear layer whose weight is 8-bit numbers and scales: op `fp8.linear`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, UnknownNameError, op
from kpt_core.policy import next_power_of_two

from .dequantize import check_quantized, dequantize
from .formats import require_floating, require_fp8
from .quantize import check_scale_format, quantize
from .scaled_mm import check_product
from .scales import BLOCKS, check_scale

_NAME = "fp8.linear"
#: Activations stay as they are: the weight alone is quantised.
NONE = "none"


def _check(call: Call) -> None:
    x, weight, input_scale = call.x, call.weight, call.input_scale
    require_floating(_NAME, "x", x.dtype)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise InputError(
            f"{_NAME}: x must be [M, K] and weight [N, K] with equal K; got {list(x.shape)} and {list(weight.shape)}"
        )
    check_quantized(_NAME, "weight", weight, call.scale, call.granularity)
    if call.activations not in (NONE, *BLOCKS):
        raise UnknownNameError("granularity of activations", call.activations, (NONE, *BLOCKS))
    if call.activations == NONE and input_scale is not None:
        raise InputError(f"{_NAME}: input_scale is for quantised activations; got activations='none': leave it out")
    if call.activations != NONE:
        require_fp8(_NAME, "activation_dtype", call.activation_dtype)
        check_scale_format(_NAME, torch.float32, call.activation_rounding)
        if input_scale is not None:
            check_scale(_NAME, "input_scale", input_scale, x.shape, call.activations)
    check_product(_NAME, x, weight.shape[0], call.bias, x.dtype, weight=weight, input_scale=input_scale)
    if call.bias is not None and call.bias.dtype is not x.dtype:
        raise InputError(f"{_NAME}: bias must have x's dtype, {x.dtype}; got {call.bias.dtype}: convert it")


def _fake(call: Call) -> Tensor:
    return call.x.new_empty((call.x.shape[0], call.weight.shape[0]))  # type: ignore[no-any-return]


def _flops(call: Call) -> int:
    return 2 * call.x.shape[0] * call.x.shape[1] * call.weight.shape[0]  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K, N, and what shares a scale."""
    rows, inner = call.x.shape
    return next_power_of_two(rows), inner, call.weight.shape[0], call.granularity, call.activations


@op(_NAME, check=_check, fake=_fake, flops=_flops, size_key=_size_key, autocast=("x", "bias"), unread=("x", "bias"))
def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    granularity: str = "row",
    activations: str = NONE,
    activation_dtype: torch.dtype = torch.float8_e4m3fn,
    activation_rounding: str = "none",
) -> Tensor:
    """Compute `x @ (weight * scale).t() + bias`, of `x` as it is or quantised; sum in float32 and round once.

    Differentiable with respect to `x` and `bias`. Quantised activations count as if they were not (straight-through,
    arXiv:1308.3432). Where they are infinite they count as NaN, so that an overflow is seen in the result, although
    `fp8.quantize` lets infinities saturate; where they are not finite, their gradient is not specified. The weight is
    frozen. A kernel may multiply the sum by the scale instead, so a result is specified where the sum, with and without
    the scale, stays within the range of float32; likewise gradients.

    Args:
        x: `[M, K]` float64, float32, bfloat16 or float16.
        weight: `[N, K]` of an 8-bit format.
        scale: of `scale_shape([N, K], granularity)`, float32, float64 or float8_e8m0fnu, as `fp8.quantize` gives it.
        bias: `[N]` of `x`'s dtype, or None.
        input_scale: for quantised activations: what to divide them by, of `scale_shape([M, K], activations)` (static,
            as calibration found it). None: what they ask for themselves (dynamic).
        granularity: what shares a scale of the weight: `tensor`, `row`, `1x128`, `128x128` or `1x32`.
        activations: likewise of `x`, which is quantised by `fp8.quantize`; `none` leaves it as it is (weight-only).
        activation_dtype: what `x` is quantised to.
        activation_rounding: of the activations' scales, as `fp8.quantize` takes it.

    Returns:
        `[M, N]` of `x`'s dtype.

    Raises:
        InputError: a shape, dtype or device does not fit, or what is frozen requires a gradient.
        UnknownNameError: no such granularity or rounding.
    """
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = x.to(wide)
    if activations != NONE:
        codes, own = quantize.reference(
            x.detach(), input_scale, dtype=activation_dtype, granularity=activations, scale_rounding=activation_rounding
        )
        numbers = dequantize.reference(codes, own, granularity=activations, dtype=wide)
        # Zero, with the gradient of `x`; NaN where an infinity would have passed for the largest number.
        rows = numbers + torch.where(rows.isfinite(), rows - rows.detach(), torch.nan)
    product = rows @ dequantize.reference(weight, scale, granularity=granularity, dtype=wide).t()
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)
