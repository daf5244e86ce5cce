"""A linear layer as it is: op `linear.dense`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, Kernel, op
from kpt_core.policy import next_power_of_two

_NAME = "linear.dense"
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _check(call: Call) -> None:
    x, weight, bias = call.x, call.weight, call.bias
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{_NAME}: x must be [..., M, K] and weight [N, K] with equal K; got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{_NAME}: bias must be [{weight.shape[0]}], one number a column; got {list(bias.shape)}")
    if x.dtype not in _FLOATING or weight.dtype is not x.dtype or (bias is not None and bias.dtype is not x.dtype):
        told = (x.dtype, weight.dtype, *(() if bias is None else (bias.dtype,)))
        raise InputError(f"{_NAME}: all must have one floating dtype; got {', '.join(map(str, told))}: convert them")


def _fake(call: Call) -> Tensor:
    return call.x.new_empty((*call.x.shape[:-1], call.weight.shape[0]))  # type: ignore[no-any-return]


def _flops(call: Call) -> int:
    return 2 * call.x.numel() * call.weight.shape[0]  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, K and N."""
    return next_power_of_two(call.x.shape[:-1].numel()), call.x.shape[-1], call.weight.shape[0]


@op(_NAME, check=_check, fake=_fake, flops=_flops, size_key=_size_key, autocast=("x", "weight", "bias"))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.t() + bias`; sum in float32 (float64 for float64) and round once.

    Args:
        x: `[..., M, K]` float64, float32, bfloat16 or float16.
        weight: `[N, K]` of `x`'s dtype.
        bias: `[N]` of `x`'s dtype, or None.

    Returns:
        `[..., M, N]` of `x`'s dtype.

    Raises:
        InputError: a shape or dtype does not fit.
    """
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    product = x.to(wide) @ weight.to(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)


def forward(call: Call) -> Tensor:
    """Compute by torch's own layer."""
    # Of rows with something between them it reads that too, in bfloat16 on CPUs: NaN there gave NaN.
    x, weight = call.x.contiguous(), call.weight.contiguous()
    return torch.nn.functional.linear(x, weight, call.bias)


def backward(call: Call, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """Compute the gradients that are wanted by torch's own products, as autograd does for `nn.Linear`."""
    rows, found = grad.contiguous().flatten(0, -2), {}
    if "x" in call.needs:
        found["x"] = (rows @ call.weight.contiguous()).view(call.x.shape)
    if "weight" in call.needs:
        found["weight"] = rows.t() @ call.x.contiguous().flatten(0, -2)
    if "bias" in call.needs:
        found["bias"] = rows.sum(0)
    return found


OPS = (linear, Kernel(_NAME, forward=f"{__name__}:forward", backward=f"{__name__}:backward"))
