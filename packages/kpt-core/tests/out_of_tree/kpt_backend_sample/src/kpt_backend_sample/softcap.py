"""Softly capped values: op `sample.softcap` and its kernels."""

import torch
from torch import Tensor

from kpt_core import Call, Refusal, op


@op("sample.softcap", saves="results")
def softcap(x: Tensor, *, cap: float = 30.0) -> Tensor:
    """Squeeze values into (-cap, cap).

    Args:
        x: any shape, floating point.
        cap: positive.

    Returns:
        `cap * tanh(x / cap)`, of x's shape and dtype.
    """
    return cap * torch.tanh(x / cap)


def kernel(call: Call) -> Tensor:
    """Multiply by the reciprocal; fails in float16, which it forgot to refuse, so that KPT has something to contain."""
    if call.x.dtype is torch.float16:
        raise RuntimeError("invalid device function")
    return torch.tanh(call.x * (1.0 / call.cap)) * call.cap


def backward(call: Call, saved: tuple[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The gradient of x, from the result alone."""
    return {"x": grad * (1 - (saved[0] / call.cap).square())}


def unsupported(call: Call) -> Refusal | None:
    """Why a call is not for `kernel`; the sentence is put together when somebody reads it."""
    if not call.x.is_contiguous():
        return Refusal("x has strides {strides}; call x.contiguous() first", strides=list(call.x.stride()))
    return None


def tensor_core_kernel(call: Call) -> Tensor:
    """Never runs: no CPU has what it needs."""
    raise AssertionError("chosen without its capability")
