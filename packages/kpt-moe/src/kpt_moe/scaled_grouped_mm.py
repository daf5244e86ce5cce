"""The grouped matrix product of experts with 8-bit weights: op `moe.scaled_grouped_mm`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from ._dtypes import DTYPES, FLOAT8, NAMES_OF_DTYPES, NAMES_OF_FLOAT8, wide_dtype
from ._scales import SCALE_DTYPES, dequantise, has_one_of, in_blocks, one_of
from .grouped_mm import flops_of_products, owned_rows

_NAME = "moe.scaled_grouped_mm"


def _check(call: Call) -> None:
    x, weight, offsets, x_scale = call.x, call.weight, call.offsets, call.x_scale
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise InputError(
            f"{_NAME}: x must be [rows, K] and weight [num_experts, K, N] with equal K; "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if weight.dtype not in FLOAT8:
        raise InputError(
            f"{_NAME}: weight must be {NAMES_OF_FLOAT8}; got {weight.dtype}: quantise it "
            f"(kpt_fp8.quantize_to_fp8), or call moe.grouped_mm"
        )
    if x_scale is None and x.dtype not in DTYPES:
        raise InputError(
            f"{_NAME}: x must be {NAMES_OF_DTYPES}, or {NAMES_OF_FLOAT8} with an x_scale; got {x.dtype} without one"
        )
    if x_scale is not None and x.dtype not in FLOAT8:
        raise InputError(f"{_NAME}: x_scale is for an x of {NAMES_OF_FLOAT8}; got x of {x.dtype}: leave x_scale out")
    num_experts, inner, columns = weight.shape
    if offsets.dtype is not torch.int32 or list(offsets.shape) != [num_experts]:
        raise InputError(
            f"{_NAME}: offsets must be int32 of shape [{num_experts}], one end row per expert; "
            f"got {offsets.dtype} {list(offsets.shape)}"
        )
    rest = ([columns], [1, columns], [inner, 1], in_blocks(inner, columns))
    _check_scale("scale", call.scale, [[num_experts, *sizes] for sizes in rest])
    if x_scale is not None:
        _check_scale("x_scale", x_scale, [[x.shape[0], 1], [x.shape[0], *in_blocks(inner)]])
    if call.out_dtype is not None and call.out_dtype not in DTYPES:
        raise InputError(f"{_NAME}: out_dtype must be {NAMES_OF_DTYPES}, or None; got {call.out_dtype}")
    tensors = {"weight": weight, "scale": call.scale, "x_scale": x_scale, "offsets": offsets}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise InputError(
                f"{_NAME}: x is on {x.device}, but {name} on {tensor.device}: all must be on one device; move one"
            )
    require_frozen(_NAME, x=x if x.dtype in FLOAT8 else None, weight=weight, scale=call.scale, x_scale=x_scale)


def _check_scale(name: str, scale: Tensor, shapes: list[list[int]]) -> None:
    if scale.dtype not in SCALE_DTYPES or not has_one_of(scale, shapes):
        raise InputError(
            f"{_NAME}: {name} must be float32 or float64 of shape {one_of(shapes)}; "
            f"got {scale.dtype} {list(scale.shape)}"
        )


def require_frozen(name: str, **tensors: Tensor | None) -> None:
    """Raise `InputError` for quantised tensors that want a gradient."""
    wanting = [key for key, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise InputError(
            f"{name}: {wanting[0]} is quantised or scales what is, and has no gradient; got requires_grad=True: "
            "call requires_grad_(False) on it"
        )


def result_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the op's result."""
    return out_dtype or (torch.bfloat16 if x.dtype in FLOAT8 else x.dtype)


def _fake(call: Call) -> Tensor:
    shape = call.x.shape[0], call.weight.shape[2]
    return call.x.new_empty(shape, dtype=result_dtype(call.x, call.out_dtype))  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K, N, experts, which of K and N is contiguous, what scales."""
    experts, inner, columns = call.weight.shape
    scales = "blocks" if list(call.scale.shape) == [experts, *in_blocks(inner, columns)] else "channels"
    layout = "KN" if call.weight.stride(2) == 1 else "NK"
    return next_power_of_two(call.x.shape[0]), inner, columns, experts, layout, scales


@op(_NAME, check=_check, fake=_fake, flops=flops_of_products, size_key=_size_key, autocast=("x",), unread=("x",))
def scaled_grouped_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each expert's contiguous rows by that expert's matrix of 8-bit numbers and their scales.

    `out[r] = (x[r] * x_scale[r]) @ (weight[e] * scale[e])` for the rows `r` of expert `e`. Products are of the
    dequantised numbers, summed in float32 (float64 if x or the result is float64), and rounded once.

    Differentiable with respect to a floating `x`; weights are frozen and scales have no gradient: one that requires it
    is refused.

    Args:
        x: `[rows, K]`, sorted by expert; float64, float32, bfloat16 or float16 (weights alone are quantised), or
            float8_e4m3fn or float8_e5m2 with an `x_scale`.
        weight: `[num_experts, K, N]` of float8_e4m3fn or float8_e5m2, any strides: pass `w.transpose(1, 2)` for
            matrices stored as `[N, K]`.
        scale: float32 (or float64), what the numbers of `weight` are multiplied by. `[num_experts, N]` or
            `[num_experts, 1, N]`: one for each output channel; `[num_experts, K, 1]`: for each input channel, as the
            transposed product of a backward has them; `[num_experts, ceil(K / 128), ceil(N / 128)]`: for each block of
            128 by 128, as in DeepSeek-V3 (`weight_scale_inv`, exchanged for matrices stored as `[N, K]`).
        offsets: `[num_experts]` int32, the end row of each expert; non-decreasing. An expert may have no rows.
        x_scale: float32 (or float64), for an 8-bit `x`: `[rows, 1]`, or `[rows, ceil(K / 128)]` for blocks of 128.
        out_dtype: of the result; None is x's dtype, and bfloat16 for an 8-bit `x`.

    Returns:
        `[rows, N]`. Rows at and past `offsets[-1]` are zero, whatever `x` holds there.

    Raises:
        InputError: a shape, dtype or device does not fit, or what is frozen requires a gradient.

    Source: torch.nn.functional.scaled_grouped_mm; DeepSeek-V3 (arXiv:2412.19437) for the blocks.
    """
    out_dtype = result_dtype(x, out_dtype)
    wide = wide_dtype(x.dtype, out_dtype)
    rows = x.to(wide) if x_scale is None else dequantise(x, x_scale, wide)
    scales = scale.unsqueeze(1) if scale.dim() == 2 else scale
    out = rows.new_zeros(x.shape[0], weight.shape[2])
    for own, codes, factor in zip(owned_rows(x.shape[0], offsets), weight.unbind(0), scales.unbind(0), strict=True):
        out = torch.where(own, torch.where(own, rows, 0) @ dequantise(codes, factor, wide), out)
    return out.to(out_dtype)
