"""`fp8.linear` of activations that stay as they are, and the calls that it refuses."""

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_core import Call, Refusal

#: Formats that torch_xla holds.
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    if call.weight.dtype not in FORMATS:
        return Refusal("a weight in {dtype}; torch_xla holds float8_e4m3fn and float8_e5m2", dtype=call.weight.dtype)
    if call.scale.dtype is not torch.float32:
        return Refusal("scales in {dtype}; this kernel takes float32", dtype=call.scale.dtype)
    if call.activations != "none":
        return Refusal("activations={form!r}; this kernel is for a quantised weight alone", form=call.activations)
    if 0 in (*call.x.shape, *call.weight.shape):
        return "tensors without elements; needs some"
    return None


def forward(call: Call) -> Tensor:
    """`[M, N]` of x's dtype."""
    found: Tensor = jax("fp8_linear:forward", call.x, call.weight, call.scale, call.bias, granularity=call.granularity)
    return found


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients of `x` and `bias`."""
    grads: dict[str, Tensor] = {}
    if "x" in call.needs:
        grads["x"] = jax("fp8_linear:backward", grad, call.weight, call.scale, granularity=call.granularity)
    if "bias" in call.needs:
        grads["bias"] = grad.float().sum(0).to(grad.dtype)
    return grads
