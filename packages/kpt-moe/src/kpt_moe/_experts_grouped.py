"""`moe.experts` over grouped products: for devices whose memory the host can't read without waiting."""

import torch
from torch import Tensor

from ._experts_loop import Gradients, sum_dtype
from .activations import Activation
from .grouped_mm import grouped_mm, wgrad_like
from .permutation import expert_of_rows, inside, inverse
from .scaled_grouped_mm import scaled_grouped_mm


def _tokens(order: Tensor, top_k_weights: Tensor) -> Tensor:
    return order // top_k_weights.shape[1]


def _sorted_weights(top_k_weights: Tensor, order: Tensor, offsets: Tensor, wide: torch.dtype) -> Tensor:
    """Routing weights of the sorted rows `[rows, 1]`, zero for rows of no expert here."""
    return _inside_only(top_k_weights.reshape(-1, 1)[order].to(wide), offsets)


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, offsets: Tensor) -> Tensor:
    return grouped_mm(x, weight, offsets) if scale is None else scaled_grouped_mm(x, weight, scale, offsets)


def _plus(rows: Tensor, bias: Tensor | None, expert: Tensor | None) -> Tensor:
    """`rows` and its bias, the sum not rounded: the product was rounded already."""
    return rows if bias is None else rows.to(sum_dtype(rows)) + bias[expert]


def _sum_choices(rows: Tensor, order: Tensor, tokens: int, top_k: int) -> Tensor:
    """Gather each token's rows and sum them: no scatter, so that the order of the sum is fixed."""
    return rows[inverse(order)].view(tokens, top_k, rows.shape[1]).sum(1, dtype=sum_dtype(rows))


def forward(
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    act: Activation,
    training: bool,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output `[tokens, hidden_size]` and the pre-activation without its bias `[rows, width]`."""
    expert = expert_of_rows(offsets, order.shape[0]) if up_bias is not None or down_bias is not None else None
    h = _product(x[_tokens(order, top_k_weights)], up, up_scale, offsets)
    y = _product(act(_plus(h, up_bias, expert)).to(x.dtype), down, down_scale, offsets)
    weighted = _plus(y, down_bias, expert) * _sorted_weights(top_k_weights, order, offsets, sum_dtype(x))
    return _sum_choices(weighted, order, *top_k_weights.shape).to(x.dtype), h


def backward(
    grad: Tensor,
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    h: Tensor,
    act: Activation,
    needed: tuple[bool, ...],
    up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> Gradients:
    """Gradients of x, top_k_weights, up, down, up_bias and down_bias; None where not needed."""
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    tokens = _tokens(order, top_k_weights)
    wide = sum_dtype(x)
    weights = _sorted_weights(top_k_weights, order, offsets, wide)
    grad_y = grad[tokens]
    biased = need_up_bias or up_bias is not None or down_bias is not None
    expert = expert_of_rows(offsets, order.shape[0]) if biased else None
    h = _plus(h, up_bias, expert)
    a = act(h)
    grad_a = _product(grad_y, down.mT, None if down_scale is None else down_scale.mT, offsets)
    grad_x = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    if need_weights:
        rows = (grad_a * a).sum(1, dtype=wide)
        if down_bias is not None:
            rows = rows + (grad_y * down_bias[expert]).sum(1, dtype=wide)
        grad_weights = _inside_only(rows, offsets)[inverse(order)].view_as(top_k_weights).to(top_k_weights.dtype)
    if need_down:
        grad_down = wgrad_like(down, (a * weights).to(x.dtype), grad_y, offsets)
    if need_down_bias and down_bias is not None:
        grad_down_bias = _sum_by_expert(_inside_only(grad_y * weights, offsets), expert, down_bias)
    if need_x or need_up or need_up_bias:
        grad_h = act.backward((grad_a * weights).to(h.dtype), h)
        if need_up_bias and up_bias is not None:
            grad_up_bias = _sum_by_expert(_inside_only(grad_h, offsets), expert, up_bias)
        grad_h = grad_h.to(x.dtype)
        if need_up:
            grad_up = wgrad_like(up, x[tokens], grad_h, offsets)
        if need_x:
            rows = _product(grad_h, up.mT, None if up_scale is None else up_scale.mT, offsets)
            grad_x = _sum_choices(rows, order, *top_k_weights.shape).to(x.dtype)
    return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


def _inside_only(rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.where(inside(offsets, rows.shape[0]).view(-1, *(1,) * (rows.dim() - 1)), rows, 0)


def _sum_by_expert(rows: Tensor, expert: Tensor | None, like: Tensor) -> Tensor:
    assert expert is not None
    total = torch.zeros(like.shape, dtype=sum_dtype(rows), device=rows.device)
    return total.index_add(0, expert, rows.to(total.dtype)).to(like.dtype)
