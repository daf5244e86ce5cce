"""What the grouped products are compared with: loops over experts and tokens in float64, and bounds that follow."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

SMALL = "16x16x16 w4 s1 g2"
SMALL_BY_DESCRIPTORS = SMALL + " tma"

_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
_CURVES = {
    "silu": F.silu,
    # Not F.gelu, which in float32 makes NaN of infinity where it is vectorised (torch 2.13).
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def ends(loads: Sequence[int], device: torch.device) -> Tensor:
    """Offsets of experts that have so many rows."""
    return torch.tensor(loads, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Differentiable; rows past the last offset are zero, and not looked at."""
    parts, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        parts.append(x[start:end] @ weight[expert])
        start = end
    return torch.cat([*parts, x.new_zeros(x.shape[0] - start, weight.shape[2])])


def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    starts = [0, *offsets.tolist()]
    parts = [x[start:end].T @ grad[start:end] for start, end in pairwise(starts)]
    return torch.stack(parts) if parts else x.new_zeros(0, x.shape[1], grad.shape[1])


def assert_sums(got: Tensor, want: Tensor, magnitude: Tensor, length: int) -> None:
    """`got` is the sum of `length` products, in float32 and any order, rounded once to its own dtype.

    A sum of n terms is off by n units of 2**-24 of the sum of their magnitudes at most (Higham, Accuracy and Stability
    of Numerical Algorithms, 3.1), products and a few factors behind add some; the rounding at most half a unit.
    """
    info = torch.finfo(got.dtype)
    bound = info.eps / 2 * want.abs() + (length + 8) * 2.0**-24 * magnitude + info.smallest_normal * info.eps
    assert got.shape == want.shape
    error = (wide(got) - want).abs()
    assert (error <= bound).all(), f"off by {error.max():.3g} where {bound[error == error.max()].min():.3g} is allowed"


def activation(
    h: Tensor, name: str, interleaved: bool = False, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None
) -> Tensor:
    """Differentiable, of the pre-activation `[..., width]`, by torch's own functions."""
    if name not in _GATES:
        return _CURVES[name](h)
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swiglu":
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    return _CURVES[_GATES[name]](gate) * up


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation_of: str = "swiglu", transposed: bool = False, **options: object
) -> Tensor:  # fmt: skip
    """Token by token and choice by choice, differentiable; `options` as `activation` has them."""
    if not transposed:
        up, down = up.mT, down.mT
    out = []
    for token, ids in enumerate(index.tolist()):
        total = x.new_zeros(down.shape[2])
        for choice, expert in enumerate(ids):
            if 0 <= expert < up.shape[0]:
                h = x[token] @ up[expert]
                h = h if up_bias is None else h + up_bias[expert]
                y = activation(h, activation_of, **options) @ down[expert]  # type: ignore[arg-type]
                y = y if down_bias is None else y + down_bias[expert]
                total = total + weights[token, choice] * y
        out.append(total)
    return torch.stack(out) if out else x.new_zeros(0, down.shape[2])


def blocks_of_scale(scale: Tensor, *sizes: int) -> Tensor:
    """A scale for each element, from those of blocks of 128 along the last dimensions; one for all stays one."""
    for position, size in enumerate(sizes, start=scale.dim() - len(sizes)):
        if scale.shape[position] not in (1, size):
            scale = scale.repeat_interleave(128, position).narrow(position, 0, size)
    return scale
