"""The product of two 8-bit matrices with scales: op `fp8.scaled_mm`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from .dequantize import check_quantized, dequantize
from .formats import require_floating

_NAME = "fp8.scaled_mm"
_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


def _check(call: Call) -> None:
    a, b, bias = call.a, call.b, call.bias
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise InputError(
            f"{_NAME}: a must be [M, K] and b [K, N] with equal K; got {list(a.shape)} and {list(b.shape)}"
        )
    check_quantized(_NAME, "a", a, call.scale_a, call.granularity_a, "scale_a")
    # What is checked is the matrix as it was quantised, along K.
    check_quantized(_NAME, "b.t()", b.t(), _transposed(call.scale_b), call.granularity_b, "scale_b.t()")
    if a.dtype in _E5M2 and b.dtype in _E5M2:
        raise InputError(
            f"{_NAME}: a or b must be float8_e4m3fn or float8_e4m3fnuz; got {a.dtype} and {b.dtype}, which no device "
            "multiplies: quantise one of them to float8_e4m3fn"
        )
    check_product(_NAME, a, b.shape[1], bias, call.out_dtype, b=b)


def check_product(
    op: str, x: Tensor, columns: int, bias: Tensor | None, out_dtype: torch.dtype, **others: Tensor | None
) -> None:
    """Raise `InputError` unless bias and the other tensors fit the product."""
    require_floating(op, "out_dtype", out_dtype)
    if bias is not None and (list(bias.shape) != [columns] or not bias.is_floating_point() or bias.dtype.itemsize == 1):
        raise InputError(f"{op}: bias must be floating [{columns}]; got {bias.dtype} {list(bias.shape)}")
    for name, tensor in {**others, "bias": bias}.items():
        if tensor is not None and tensor.device != x.device:
            raise InputError(f"{op}: operands are on {x.device}, but {name} on {tensor.device}: move one of them")


def _transposed(scale: Tensor) -> Tensor:
    return scale.t() if scale.dim() == 2 else scale


def _fake(call: Call) -> Tensor:
    return call.a.new_empty((call.a.shape[0], call.b.shape[1]), dtype=call.out_dtype)  # type: ignore[no-any-return]


def _flops(call: Call) -> int:
    return 2 * call.a.shape[0] * call.a.shape[1] * call.b.shape[1]  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K, N, and what shares a scale."""
    rows, inner = call.a.shape
    return next_power_of_two(rows), inner, call.b.shape[1], call.granularity_a, call.granularity_b


@op(_NAME, check=_check, fake=_fake, flops=_flops, size_key=_size_key)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    granularity_a: str = "row",
    granularity_b: str = "row",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `(a * scale_a) @ (b * scale_b) + bias`, summed in float32 and rounded once.

    The sum is in float64 if the result is. It has no gradient: what is quantised has none. A kernel may multiply the
    sum by scales instead, so a result is specified where neither `a * scale_a`, `b * scale_b` nor the sum, with and
    without either scale, leaves the range of float32.

    Args:
        a: `[M, K]` of an 8-bit format, quantised along K.
        b: `[K, N]` of an 8-bit format, any strides: pass `weight.t()` for a weight stored as `[N, K]`. Not both are
            float8_e5m2 or float8_e5m2fnuz.
        scale_a: of `scale_shape([M, K], granularity_a)`, float32, float64 or float8_e8m0fnu.
        scale_b: of `scale_shape([N, K], granularity_b)`; if that has two dimensions, transposed as `b` is.
        bias: `[N]` floating, or None.
        granularity_a: what shares a scale: `tensor`, `row`, `1x128`, `128x128` or `1x32`.
        granularity_b: likewise, of `b.t()`.
        out_dtype: float64, float32, bfloat16 or float16.

    Returns:
        `[M, N]` of `out_dtype`.

    Raises:
        InputError: a shape, dtype or device does not fit, or both operands are e5m2.
        UnknownNameError: no such granularity.

    Source: torch.nn.functional.scaled_mm; DeepSeek-V3 (arXiv:2412.19437) for 1x128 times 128x128.
    """
    wide = torch.float64 if out_dtype is torch.float64 else torch.float32
    left = dequantize.reference(a, scale_a, granularity=granularity_a, dtype=wide)
    right = dequantize.reference(b.t(), _transposed(scale_b), granularity=granularity_b, dtype=wide)
    product = left @ right.t()
    return (product if bias is None else product + bias.to(wide)).to(out_dtype)
