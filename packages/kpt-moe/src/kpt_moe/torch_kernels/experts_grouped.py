"""`moe.experts` over grouped products, for devices whose memory the host can't read without waiting."""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_moe._dtypes import wide_dtype
from kpt_moe._scales import multiplied
from kpt_moe.activations import activation_of
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_moe.permutation import expert_of_rows, inside, inverse, sort_by_expert
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

from .grouped_mm import wgrad_like


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output `[tokens, hidden_size]`, and in training what the op saves."""
    x, dtype = call.x, call.x.dtype
    up, down = _projections(call)
    order, offsets = sort_by_expert(call.top_k_index, call.gate_up_proj.shape[0])
    h = _product(x[order // call.top_k_index.shape[1]], *up, offsets)
    a = activation_of(call)(_plus(h, call.gate_up_proj_bias, offsets)).to(dtype)
    y = _plus(_product(a, *down, offsets), call.down_proj_bias, offsets)
    out = _sum_choices(y * _sorted_weights(call, order, offsets), order, call).to(dtype)
    return out, (h, order.int(), offsets) if call.needs else ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are needed."""
    h, order, offsets = saved
    order = order.long()
    x, up_bias, down_bias, needs = call.x, call.gate_up_proj_bias, call.down_proj_bias, call.needs
    act, wide, dtype = activation_of(call), wide_dtype(x.dtype), x.dtype
    (up, up_scale), (down, down_scale) = _projections(call)
    tokens = order // call.top_k_index.shape[1]
    weights = _sorted_weights(call, order, offsets)
    grad_y = grad[tokens]
    h = _plus(h, up_bias, offsets)
    a = act(h)
    grad_a = _product(grad_y, down.mT, None if down_scale is None else down_scale.mT, offsets)
    grads = {}
    if "top_k_weights" in needs:
        rows = (grad_a * a).sum(1, dtype=wide)
        if down_bias is not None:
            rows = rows + (grad_y * down_bias[expert_of_rows(offsets, rows.shape[0])]).sum(1, dtype=wide)
        of_pairs = _inside_only(rows, offsets)[inverse(order)].view(call.top_k_weights.shape)
        grads["top_k_weights"] = of_pairs.to(call.top_k_weights.dtype)
    if "down_proj" in needs:
        grads["down_proj"] = _stored(wgrad_like(down, (a * weights).to(dtype), grad_y, offsets), call)
    if "down_proj_bias" in needs:
        grads["down_proj_bias"] = _sum_by_expert(grad_y * weights, offsets, down_bias)
    if not {"x", "gate_up_proj", "gate_up_proj_bias"}.intersection(needs):
        return grads
    grad_h = act.backward((grad_a * weights).to(h.dtype), h)
    if "gate_up_proj_bias" in needs:
        grads["gate_up_proj_bias"] = _sum_by_expert(grad_h, offsets, up_bias)
    grad_h = grad_h.to(dtype)
    if "gate_up_proj" in needs:
        grads["gate_up_proj"] = _stored(wgrad_like(up, x[tokens], grad_h, offsets), call)
    if "x" in needs:
        rows = _product(grad_h, up.mT, None if up_scale is None else up_scale.mT, offsets)
        grads["x"] = _sum_choices(rows, order, call).to(dtype)
    return grads


def _projections(call: Call) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Matrices `[num_experts, inputs, outputs]` and their scales, of either product."""
    up = multiplied(call.gate_up_proj, call.gate_up_scale, call.transposed)
    return up, multiplied(call.down_proj, call.down_scale, call.transposed)


def _stored(grad: Tensor, call: Call) -> Tensor:
    """The gradient of matrices `[num_experts, inputs, outputs]` as the matrices are stored."""
    return grad if call.transposed else grad.mT


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, offsets: Tensor) -> Tensor:
    return grouped_mm(x, weight, offsets) if scale is None else scaled_grouped_mm(x, weight, scale, offsets)


def _plus(rows: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`rows` and the biases of their experts, the sum not rounded: the product was rounded already."""
    if bias is None:
        return rows
    return rows.to(wide_dtype(rows.dtype)) + bias[expert_of_rows(offsets, rows.shape[0])]


def _sorted_weights(call: Call, order: Tensor, offsets: Tensor) -> Tensor:
    """Routing weights of the sorted rows `[rows, 1]`, zero for rows of no expert here."""
    weights = call.top_k_weights.reshape(-1, 1)[order]
    return _inside_only(weights.to(wide_dtype(call.x.dtype)), offsets)


def _sum_choices(rows: Tensor, order: Tensor, call: Call) -> Tensor:
    """Gather each token's rows and sum them: no scatter, so that the order of the sum is fixed."""
    by_token = rows[inverse(order)].view(*call.top_k_index.shape, rows.shape[1])
    return by_token.sum(1, dtype=wide_dtype(rows.dtype))


def _inside_only(rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.where(inside(offsets, rows.shape[0]).view(-1, *(1,) * (rows.dim() - 1)), rows, 0)


def _sum_by_expert(rows: Tensor, offsets: Tensor, like: Tensor) -> Tensor:
    """The rows of each expert, summed, as the gradient of its bias.

    By a product, whose order is fixed; of four columns of ones, since torch's own wants 16 bytes at least.
    """
    rows = rows.to(wide_dtype(rows.dtype))
    return grouped_mm_wgrad(rows.new_ones(rows.shape[0], 4), rows, offsets)[:, 0].to(like.dtype).contiguous()
