"""`moe.experts` over grouped products: for devices whose memory the host can't read without waiting."""

import torch
from torch import Tensor

from .activations import Activation
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .permutation import expert_of_rows, inverse

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _tokens(order: Tensor, top_k_weights: Tensor) -> Tensor:
    return order // top_k_weights.shape[1]


def _sorted_weights(top_k_weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Routing weights of the sorted rows `[rows, 1]`, zero for rows of no expert here."""
    inside = torch.arange(order.shape[0], device=order.device) < offsets[-1:]
    return torch.where(inside, top_k_weights.reshape(-1)[order], 0).unsqueeze(1)


def _sum_choices(rows: Tensor, order: Tensor, tokens: int, top_k: int) -> Tensor:
    """Gather each token's rows and sum them: no scatter, so that the order of the sum is fixed."""
    return rows[inverse(order)].view(tokens, top_k, rows.shape[1]).sum(1)


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
) -> tuple[Tensor, Tensor]:
    """Returns the output `[tokens, hidden_size]` and the pre-activation `[rows, width]`."""
    expert = expert_of_rows(offsets, order.shape[0]) if up_bias is not None or down_bias is not None else None
    h = grouped_mm(x[_tokens(order, top_k_weights)], up, offsets)
    if up_bias is not None:
        h = h + up_bias[expert]
    y = grouped_mm(act(h), down, offsets)
    if down_bias is not None:
        y = y + down_bias[expert]
    weighted = y * _sorted_weights(top_k_weights, order, offsets)
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
) -> Gradients:
    """Gradients of x, top_k_weights, up, down, up_bias and down_bias; None where not needed."""
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    tokens = _tokens(order, top_k_weights)
    weights = _sorted_weights(top_k_weights, order, offsets)
    grad_y = grad[tokens]
    a = act(h)
    grad_a = grouped_mm(grad_y, down.mT, offsets)
    expert = expert_of_rows(offsets, order.shape[0]) if need_up_bias or down_bias is not None else None
    grad_x = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    if need_weights:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = (grad_a * a).sum(1, dtype=wide)
        if down_bias is not None:
            rows = rows + (grad_y * down_bias[expert]).sum(1, dtype=wide)
        grad_weights = _inside_only(rows, offsets)[inverse(order)].view_as(top_k_weights).to(top_k_weights.dtype)
    if need_down:
        grad_down = _weight_gradient((a * weights).to(x.dtype), grad_y, offsets, down)
    if need_down_bias and down_bias is not None:
        grad_down_bias = _sum_by_expert(_inside_only(grad_y * weights, offsets), expert, down_bias)
    if need_x or need_up or need_up_bias:
        grad_h = act.backward((grad_a * weights).to(x.dtype), h)
        if need_up:
            grad_up = _weight_gradient(x[tokens], grad_h, offsets, up)
        if need_up_bias and up_bias is not None:
            grad_up_bias = _sum_by_expert(_inside_only(grad_h, offsets), expert, up_bias)
        if need_x:
            rows = grouped_mm(grad_h, up.mT, offsets)
            grad_x = _sum_choices(rows, order, *top_k_weights.shape)
    return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


def _inside_only(rows: Tensor, offsets: Tensor) -> Tensor:
    inside = torch.arange(rows.shape[0], device=rows.device) < offsets[-1:]
    return torch.where(inside if rows.dim() == 1 else inside.unsqueeze(1), rows, 0)


def _weight_gradient(x: Tensor, grad: Tensor, offsets: Tensor, like: Tensor) -> Tensor:
    """In the memory order of `like`, which spares autograd a copy."""
    if like.stride(1) < like.stride(2):
        return grouped_mm_wgrad(grad, x, offsets).mT
    return grouped_mm_wgrad(x, grad, offsets)


def _sum_by_expert(rows: Tensor, expert: Tensor | None, like: Tensor) -> Tensor:
    assert expert is not None
    total = torch.zeros(like.shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    return total.index_add(0, expert, rows.to(total.dtype)).to(like.dtype)
