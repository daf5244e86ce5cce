"""Right kernels, made of parts: each fault in `mutants` changes one of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: A kernel's forward or backward; and what those of `moe.grouped_mm` are made of.
Function = Callable[..., Any]
Part = Callable[[Tensor, Tensor, Tensor], Tensor]


def ends_of(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row)."""
    ends = offsets.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]


def product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The grouped product, in another order of summation than the reference's: halves of K in turn."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    half = x.shape[1] // 2
    for expert, start, end in ends_of(offsets):
        rows, matrix = x[start:end].to(wide), weight[expert].to(wide)
        out[start:end] = (rows[:, half:] @ matrix[half:] + rows[:, :half] @ matrix[:half]).to(x.dtype)
    return out


def product_for_x(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of `x`."""
    return product(grad, weight.mT, offsets)


def product_for_weight(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of `weight`."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = torch.zeros(offsets.shape[0], x.shape[1], grad.shape[1], dtype=x.dtype, device=x.device)
    for expert, start, end in ends_of(offsets):
        out[expert] = (x[start:end].to(wide).t() @ grad[start:end].to(wide)).to(x.dtype)
    return out


def grouped_mm_of(
    forward: Part = product, for_x: Part = product_for_x, for_weight: Part = product_for_weight
) -> tuple[Function, Function]:
    """Forward and backward of a kernel of `moe.grouped_mm`, as a backend would write them.

    Args:
        forward: computes the result.
        for_x: computes the gradient of `x` from the cotangent, the weight and the offsets.
        for_weight: computes the gradient of `weight` from `x`, the cotangent and the offsets.
    """

    def grouped_mm(call: Any) -> Tensor:
        return forward(call.x, call.weight, call.offsets)

    def grouped_mm_backward(call: Any, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
        made = {}
        if "x" in call.needs:
            made["x"] = for_x(grad, call.weight, call.offsets)
        if "weight" in call.needs:
            made["weight"] = for_weight(call.x, grad, call.offsets)
        return made

    return grouped_mm, grouped_mm_backward


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def activate(h: Tensor, activation: str, interleaved: bool, alpha: float, beta: float, limit: float | None) -> Tensor:
    """Any activation of `moe.experts`."""
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation](h)
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)
    if activation != "swiglu":
        return ACTIVATIONS[GATED[activation]](gate) * up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def stored(weight: Tensor, scale: Tensor | None, transposed: bool, wide: torch.dtype) -> Tensor:
    """Matrices as input by output; quantised ones times their scales, of output channels or of blocks of 128 by 128."""
    values = weight.to(wide)
    if scale is not None and scale.dim() == 2:
        values = values * scale.unsqueeze(1 if transposed else 2)
    elif scale is not None:
        blocks = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        values = values * blocks[:, : weight.shape[1], : weight.shape[2]]
    return values if transposed else values.mT


class Experts:
    """A kernel of `moe.experts` as one dense sum over experts: slow, right, and differentiable by autograd."""

    def here(self, index: Tensor, num_experts: int, expert: int) -> Tensor:
        """`[tokens, top_k]`: which pairs are of an expert."""
        return index == expert

    def weigh(self, y: Tensor, weight: Tensor) -> Tensor:
        """An expert's outputs times the routing weights of its rows."""
        return y * weight

    def biased(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The down projection's bias added."""
        return y if bias is None else y + bias

    def activate(self, h: Tensor, **parameters: Any) -> Tensor:
        """The activation."""
        return activate(h, **parameters)

    def total(self, parts: list[Tensor], x: Tensor) -> Tensor:
        """The sum over experts."""
        out = torch.zeros(x.shape, dtype=parts[0].dtype, device=x.device)
        for part in reversed(parts):
            out = out + part
        return out

    def rows(self, mask: Tensor) -> Tensor:
        """The pairs that are computed, of those that are of an expert."""
        return mask

    def __call__(self, call: Any) -> Tensor:
        x = call.x
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        up = stored(call.gate_up_proj, call.gate_up_scale, call.transposed, wide)
        down = stored(call.down_proj, call.down_scale, call.transposed, wide)
        rows, weights = x.to(wide), call.top_k_weights.to(wide)
        parts = [torch.zeros(x.shape, dtype=wide, device=x.device)]
        for expert in range(up.shape[0]):
            mask = self.rows(self.here(call.top_k_index, up.shape[0], expert))
            token, choice = mask.nonzero(as_tuple=True)
            h = rows[token] @ up[expert].to(wide)
            if call.gate_up_proj_bias is not None:
                h = h + call.gate_up_proj_bias[expert].to(wide)
            options = {name: getattr(call, name) for name in ("activation", "interleaved", "alpha", "beta", "limit")}
            a = self.activate(h, **options)
            bias = None if call.down_proj_bias is None else call.down_proj_bias[expert].to(wide)
            y = self.biased(a @ down[expert].to(wide), bias)
            weighted = self.weigh(y, weights[token, choice].unsqueeze(1))
            parts.append(parts[0].index_add(0, token, weighted))
        return self.total(parts, x).to(x.dtype)


def scaled_mm(call: Any) -> Any:
    """A kernel of `sample.scaled_mm` that scales first."""
    wide = call.x_scale.dtype if call.x.dtype is not torch.float64 else torch.float64
    rows = call.x.to(wide) * call.x_scale.unsqueeze(1)
    return (rows @ (call.weight.to(wide) * call.weight_scale)).to(call.x.dtype), (rows,) if call.needs else ()


def scaled_mm_backward(call: Any, saved: tuple[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Its gradients, from the scaled rows that it saves."""
    (rows,) = saved
    grad = grad.to(rows.dtype) * call.weight_scale
    made = {}
    if "x" in call.needs:
        made["x"] = ((grad @ call.weight.to(rows.dtype).t()) * call.x_scale.unsqueeze(1)).to(call.x.dtype)
    if "weight" in call.needs:
        made["weight"] = (rows.t() @ grad).to(call.weight.dtype)
    return made
