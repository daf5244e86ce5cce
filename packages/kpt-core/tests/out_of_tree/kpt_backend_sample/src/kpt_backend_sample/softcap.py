"""Softly capped values: op `sample.softcap` and its kernels."""

import torch
from torch import Tensor

from kpt_core import op


@op("sample.softcap")
def softcap(x: Tensor, *, cap: float = 30.0) -> Tensor:
    """Squeeze values into (-cap, cap).

    Args:
        x: any shape, floating point.
        cap: positive.

    Returns:
        `cap * tanh(x / cap)`, of x's shape and dtype.
    """
    return cap * torch.tanh(x / cap)


def kernel(x: Tensor, *, cap: float = 30.0) -> Tensor:
    """Multiply by the reciprocal; fails in float16, which it forgot to refuse, so that KPT has something to contain."""
    if x.dtype is torch.float16:
        raise RuntimeError("invalid device function")
    return torch.tanh(x * (1.0 / cap)) * cap


def unsupported(x: Tensor, *, cap: float = 30.0) -> str | None:
    """Why a call is not for `kernel`."""
    if not x.is_contiguous():
        return f"x has strides {list(x.stride())}; call x.contiguous() first"
    return None


def tensor_core_kernel(x: Tensor, *, cap: float = 30.0) -> Tensor:
    """Never runs: no CPU has what it needs."""
    raise AssertionError("chosen without its capability")
