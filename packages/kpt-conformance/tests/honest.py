"""Right kernels, made of parts: each fault in `mutants` changes one of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    forward: Forward = product, for_x: Forward = product_for_x, for_weight: Forward = product_for_weight, **fake: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A kernel of `moe.grouped_mm` as a backend would write it: a custom op with its fake and its gradients.

    Args:
        forward: computes the result.
        for_x: computes the gradient of `x` from the cotangent, the weight and the offsets.
        for_weight: computes the gradient of `weight` from `x`, the cotangent and the offsets.
        **fake: `fake=function` in place of the right fake, `fake_back=function` of that of backward.
    """
    number = grouped_mm_of.made = getattr(grouped_mm_of, "made", 0) + 1  # type: ignore[attr-defined]

    @torch.library.custom_op(f"honest::grouped_mm_{number}", mutates_args=())
    def run(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return forward(x, weight, offsets)

    @run.register_fake
    def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return fake.get("fake", _fake)(x, weight, offsets)

    @torch.library.custom_op(f"honest::grouped_mm_{number}_backward", mutates_args=())
    def back(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return for_x(grad, weight, offsets), for_weight(x, grad, offsets)

    @back.register_fake
    def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return fake.get("fake_back", _fake_back)(grad, x, weight, offsets)

    def setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *back(grad, *ctx.saved_tensors), None

    run.register_autograd(backward, setup_context=setup)

    def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return run(x, weight, offsets)

    return grouped_mm


def _fake(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _fake_back(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def columns_first() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A kernel of `moe.grouped_mm` whose result is contiguous in its columns."""
    return grouped_mm_of(
        lambda x, weight, offsets: product(x, weight, offsets).t().contiguous().t(),
        fake=lambda x, weight, offsets: x.new_empty(weight.shape[2], x.shape[0]).t(),
    )


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

    def __call__(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        gate_up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        *,
        activation: str = "swiglu",
        transposed: bool = False,
        interleaved: bool = False,
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float | None = None,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        up = stored(gate_up_proj, gate_up_scale, transposed, wide)
        down = stored(down_proj, down_scale, transposed, wide)
        rows, weights = x.to(wide), top_k_weights.to(wide)
        parts = [torch.zeros(x.shape, dtype=wide, device=x.device)]
        for expert in range(up.shape[0]):
            mask = self.rows(self.here(top_k_index, up.shape[0], expert))
            token, choice = mask.nonzero(as_tuple=True)
            h = rows[token] @ up[expert].to(wide)
            if gate_up_proj_bias is not None:
                h = h + gate_up_proj_bias[expert].to(wide)
            a = self.activate(h, activation=activation, interleaved=interleaved, alpha=alpha, beta=beta, limit=limit)
            bias = None if down_proj_bias is None else down_proj_bias[expert].to(wide)
            y = self.biased(a @ down[expert].to(wide), bias)
            weighted = self.weigh(y, weights[token, choice].unsqueeze(1))
            parts.append(parts[0].index_add(0, token, weighted))
        return self.total(parts, x).to(x.dtype)


def scaled_mm(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """A kernel of `sample.scaled_mm` that scales first."""
    wide = x_scale.dtype if x.dtype is not torch.float64 else torch.float64
    return ((x.to(wide) * x_scale.unsqueeze(1)) @ (weight.to(wide) * weight_scale)).to(x.dtype)
