"""What the products refuse: arguments that don't fit each other would make a kernel read memory that isn't theirs."""

import torch
from torch import Tensor

from .activation import GATED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _misfit(name: str, expected: str, *got: Tensor) -> ValueError:
    """The error to raise. Made only then: to print a size would fix it in compiled code, where it may be a symbol."""
    shown = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in got)
    return ValueError(f"{name}: expected {expected}; got {shown}")


def _check_offsets(name: str, x: Tensor, offsets: Tensor, experts: int) -> None:
    if offsets.dtype is not torch.int32 or offsets.dim() != 1 or offsets.shape[0] != experts:
        raise _misfit(name, f"offsets int32 [{experts}], one end row per expert", offsets)
    if offsets.device != x.device:
        raise ValueError(f"{name}: x is on {x.device}, but offsets are on {offsets.device}: move one")


def check_product(name: str, x: Tensor, weight: Tensor, offsets: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise `ValueError` unless x `[rows, K]`, weight `[experts, K, N]` and offsets fit, weight being of `dtypes`."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or weight.device != x.device:
        raise _misfit(name, "x [rows, K] and weight [experts, K, N] on one device", x, weight)
    if weight.dtype not in dtypes:
        raise _misfit(name, f"a weight of {' or '.join(map(str, dtypes))}", weight)
    _check_offsets(name, x, offsets, weight.shape[0])


def check_wgrad(name: str, x: Tensor, grad: Tensor, offsets: Tensor) -> None:
    """Raise `ValueError` unless x `[rows, K]`, grad `[rows, N]` and offsets fit."""
    if x.dim() != 2 or grad.dim() != 2 or x.shape[0] != grad.shape[0] or grad.device != x.device:
        raise _misfit(name, "x [rows, K] and grad [rows, N] on one device", x, grad)
    if x.dtype not in DTYPES or grad.dtype is not x.dtype:
        raise _misfit(name, "one dtype, float32, bfloat16 or float16", x, grad)
    _check_offsets(name, x, offsets, offsets.shape[0])


def check_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> None:
    """Raise `ValueError` unless the arguments of `experts` fit, the matrices as `[experts, K, N]`."""
    name = "experts"
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise _misfit(name, "x [tokens, hidden_size] of float32, bfloat16 or float16", x)
    routed = top_k_index.dim() == 2 and top_k_index.shape == top_k_weights.shape
    routed = routed and top_k_index.shape[0] == x.shape[0]
    if not routed or top_k_index.dtype not in (torch.int32, torch.int64) or top_k_weights.dtype not in DTYPES:
        expected = f"top_k_index of integers and top_k_weights of floats, both [{x.shape[0]}, top_k]"
        raise _misfit(name, expected, top_k_index, top_k_weights)
    fits = up.dim() == down.dim() == 3 and up.shape[0] == down.shape[0] and up.shape[0] >= 1
    fits = fits and up.shape[1] == x.shape[1] == down.shape[2]
    if not fits or up.shape[2] != down.shape[1] * (2 if activation in GATED else 1):
        matrices = "up [experts, hidden_size, width] and down [experts, inner, hidden_size], as they multiply"
        raise _misfit(name, f"{matrices}, for x {list(x.shape)} and {activation}", up, down)
    for weight in (up, down):
        if weight.dtype is not x.dtype and weight.dtype not in FLOAT8:
            raise _misfit(name, f"matrices of {x.dtype} or 8 bits", weight)
    for bias, weight in ((up_bias, up), (down_bias, down)):
        if bias is not None and (bias.shape != (weight.shape[0], weight.shape[2]) or bias.dtype is not x.dtype):
            raise _misfit(name, f"a bias {x.dtype} {[weight.shape[0], weight.shape[2]]}", bias)
    tensors = (top_k_index, top_k_weights, up, down, up_bias, down_bias)
    if any(tensor is not None and tensor.device != x.device for tensor in tensors):
        raise ValueError(f"{name}: all must be on the device of x, {x.device}; move the others there")


def check_scale(name: str, weight: Tensor, scale: Tensor | None) -> None:
    """Raise `ValueError` unless a weight of 8 bits has a scale `[experts, a, b]` for all experts, and another one none.

    What a and b may be is told where the scale is read.
    """
    if (scale is not None) != (weight.dtype in FLOAT8):
        raise _misfit(name, "a scale for a weight of 8 bits, and none for another one", weight)
    if scale is not None and (scale.dim() != 3 or scale.shape[0] != weight.shape[0] or scale.device != weight.device):
        raise _misfit(name, "a scale of three dimensions for all experts, on the weight's device", weight, scale)


def check_x_scale(name: str, x: Tensor, x_scale: Tensor | None) -> None:
    """Raise `ValueError` unless an 8-bit x has a scale `[rows, 1 or blocks of 128 along K]`, and another x none."""
    if (x_scale is not None) != (x.dtype in FLOAT8):
        raise _misfit(name, "an x_scale for an x of 8 bits, and none for another one", x)
    if x_scale is not None and (
        x_scale.dim() != 2 or x_scale.shape[0] != x.shape[0] or x_scale.shape[1] not in (1, -(-x.shape[1] // 128))
    ):
        raise _misfit(name, "an x_scale [rows, 1 or ceil(K / 128)]", x, x_scale)
