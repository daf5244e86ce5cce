"""What the products refuse: arguments that don't fit each other would make a kernel read memory that isn't theirs."""

import torch
from torch import Tensor

from .activation import GATED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _require(name: str, fits: bool, expected: str, *got: Tensor) -> None:
    if not fits:
        shown = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in got)
        raise ValueError(f"{name}: expected {expected}; got {shown}")


def _check_offsets(name: str, x: Tensor, offsets: Tensor, experts: int) -> None:
    fits = offsets.dtype is torch.int32 and offsets.dim() == 1 and offsets.shape[0] == experts
    _require(name, fits, f"offsets int32 [{experts}], one end row per expert", offsets)
    if offsets.device != x.device:
        raise ValueError(f"{name}: x is on {x.device}, but offsets are on {offsets.device}: move one")


def check_product(name: str, x: Tensor, weight: Tensor, offsets: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise `ValueError` unless x `[rows, K]`, weight `[experts, K, N]` and offsets fit, weight being of `dtypes`."""
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1] and weight.device == x.device
    _require(name, fits, "x [rows, K] and weight [experts, K, N] on one device", x, weight)
    _require(name, weight.dtype in dtypes, f"a weight of {' or '.join(map(str, dtypes))}", weight)
    _check_offsets(name, x, offsets, weight.shape[0])


def check_wgrad(name: str, x: Tensor, grad: Tensor, offsets: Tensor) -> None:
    """Raise `ValueError` unless x `[rows, K]`, grad `[rows, N]` and offsets fit."""
    fits = x.dim() == grad.dim() == 2 and x.shape[0] == grad.shape[0] and grad.device == x.device
    _require(name, fits, "x [rows, K] and grad [rows, N] on one device", x, grad)
    _require(name, x.dtype in DTYPES and grad.dtype is x.dtype, "one dtype, float32, bfloat16 or float16", x, grad)
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
    _require(name, x.dim() == 2 and x.dtype in DTYPES, "x [tokens, hidden_size] of float32, bfloat16 or float16", x)
    routed = top_k_index.dim() == 2 and top_k_index.shape == top_k_weights.shape and len(top_k_index) == len(x)
    whole = top_k_index.dtype in (torch.int32, torch.int64) and top_k_weights.dtype in DTYPES
    expected = f"top_k_index of integers and top_k_weights of floats, both [{x.shape[0]}, top_k]"
    _require(name, routed and whole, expected, top_k_index, top_k_weights)
    fits = up.dim() == down.dim() == 3 and up.shape[0] == down.shape[0] >= 1 and up.shape[1] == x.shape[1]
    fits = fits and down.shape[2] == x.shape[1] and up.shape[2] == down.shape[1] * (2 if activation in GATED else 1)
    matrices = "up [experts, hidden_size, width] and down [experts, inner, hidden_size], as they multiply"
    _require(name, fits, f"{matrices}, for x {list(x.shape)} and {activation}", up, down)
    for weight in (up, down):
        _require(name, weight.dtype is x.dtype or weight.dtype in FLOAT8, f"matrices of {x.dtype} or 8 bits", weight)
    for bias, weight in ((up_bias, up), (down_bias, down)):
        if bias is not None:
            shape = [weight.shape[0], weight.shape[2]]
            _require(name, list(bias.shape) == shape and bias.dtype is x.dtype, f"a bias {x.dtype} {shape}", bias)
    tensors = (top_k_index, top_k_weights, up, down, up_bias, down_bias)
    if any(tensor is not None and tensor.device != x.device for tensor in tensors):
        raise ValueError(f"{name}: all must be on the device of x, {x.device}; move the others there")
