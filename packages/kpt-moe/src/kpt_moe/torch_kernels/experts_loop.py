"""`moe.experts` for tensors in host memory: one expert after the other, in blocks of rows that stay in cache.

Large temporaries are avoided because fresh pages cost more here than the arithmetic on them: outside of training no
buffer has more than `_BLOCK` rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kpt_core import Call
from kpt_moe._dtypes import wide_dtype
from kpt_moe._scales import multiplied
from kpt_moe.activations import activation_of
from kpt_moe.permutation import sort_by_expert

from .dequantised import DequantisedMatrices, matrices
from .grouped_mm import segments

#: Rows of one block: enough for the matrix product to reach its rate, few enough for its result to stay in cache.
_BLOCK = 1024


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output `[tokens, hidden_size]`, and in training what the op saves."""
    x, training, top_k = call.x, bool(call.needs), call.top_k_index.shape[1]
    act, total_dtype = activation_of(call), wide_dtype(x.dtype)
    up, down = _projections(call)
    order, offsets = sort_by_expert(call.top_k_index, call.gate_up_proj.shape[0])
    tokens = order // top_k
    weights = call.top_k_weights.reshape(-1, 1).to(total_dtype).index_select(0, order)
    width, inner = _sizes(call)
    out = torch.zeros(x.shape, dtype=total_dtype, device=x.device)
    blocks = list(_blocks(offsets))
    most = max((sum(sizes) for _, _, sizes in blocks), default=0)
    h_all = x.new_empty(order.shape[0] if training else most, width)
    a_block, y_block = x.new_empty(most, inner), x.new_empty(most, x.shape[1])
    # The pre-activation is saved without its bias, which otherwise comes with the product.
    up_bias = call.gate_up_proj_bias
    biased_block = x.new_empty(most, width) if training and up_bias is not None else None
    for first, owners, sizes in blocks:
        rows = sum(sizes)
        own = tokens[first : first + rows]
        h = h_all[first : first + rows] if training else h_all[:rows]
        a, y = a_block[:rows], y_block[:rows]
        _products(x.index_select(0, own), up, None if training else up_bias, h, owners, sizes)
        if biased_block is not None:
            h = _plus(h, up_bias, biased_block[:rows], owners, sizes)
        _products(act.into(h, a), down, call.down_proj_bias, y, owners, sizes)
        w = weights[first : first + rows]
        if x.shape[0] == 1:
            # Decode: a product of its own size, where adding by index wakes every thread for a few rows.
            out.addmm_(w.t(), y.to(total_dtype))
        else:
            out.index_add_(0, own, y.mul_(w) if y.dtype is total_dtype else y * w)
    return out.to(x.dtype), (h_all, order.int(), offsets) if training else ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are needed."""
    h_all, order, offsets = saved
    order = order.long()
    x, top_k_weights, up_bias, down_bias = call.x, call.top_k_weights, call.gate_up_proj_bias, call.down_proj_bias
    act, total_dtype = activation_of(call), wide_dtype(x.dtype)
    up, down = _projections(call)
    grads = {name: torch.zeros_like(getattr(call, name)) for name in call.needs if name not in ("x", "top_k_weights")}
    grad_up, grad_down = (
        None if stored is None else stored if call.transposed else stored.mT
        for stored in (grads.get("gate_up_proj"), grads.get("down_proj"))
    )
    grad_up_bias, grad_down_bias = grads.get("gate_up_proj_bias"), grads.get("down_proj_bias")
    grad_x = torch.zeros(x.shape, dtype=total_dtype, device=x.device) if "x" in call.needs else None
    grad_weights = top_k_weights.new_zeros(top_k_weights.numel()) if "top_k_weights" in call.needs else None
    tokens = order // top_k_weights.shape[1]
    weights = top_k_weights.reshape(-1, 1).to(total_dtype).index_select(0, order)
    parts = list(segments(offsets))
    # What every expert needs for a while, made once: fresh pages cost more than the arithmetic on them.
    most = max((end - start for _, start, end in parts), default=0)
    width, inner = _sizes(call)
    x_all, y_all = (x.new_empty(most, x.shape[1]) for _ in range(2))
    a_all, grad_a_all = (x.new_empty(most, inner) for _ in range(2))
    grad_h_all = x.new_empty(most, width) if act.gated else grad_a_all
    biased_all = None if up_bias is None else x.new_empty(most, width)
    for expert, start, end in parts:
        own, count = tokens[start:end], end - start
        h, w = h_all[start:end], weights[start:end]
        if biased_all is not None:
            h = torch.add(h, up_bias[expert], out=biased_all[:count])
        grad_y = torch.index_select(grad, 0, own, out=y_all[:count])
        a = act.into(h, a_all[:count])
        grad_a = torch.mm(grad_y, down[expert].t(), out=grad_a_all[:count])
        if grad_weights is not None:
            per_row = _dot(grad_a, a, total_dtype)
            if down_bias is not None:
                per_row += _dot(grad_y, down_bias[expert].expand_as(grad_y), total_dtype)
            grad_weights.index_copy_(0, order[start:end], per_row.to(grad_weights.dtype))
        w_own = w.to(x.dtype)
        if grad_down is not None:
            _wgrad_out(a.mul_(w_own), grad_y, grad_down[expert])
        if grad_down_bias is not None:
            grad_down_bias[expert] = (grad_y * w).sum(0)
        if grad_x is not None or grad_up is not None or grad_up_bias is not None:
            grad_h = act.backward(grad_a.mul_(w_own), h, grad_h_all[:count])
            if grad_up is not None:
                _wgrad_out(torch.index_select(x, 0, own, out=x_all[:count]), grad_h, grad_up[expert])
            if grad_up_bias is not None:
                grad_up_bias[expert] = grad_h.sum(0, dtype=total_dtype)
            if grad_x is not None:
                grad_rows = torch.mm(grad_h, up[expert].t(), out=y_all[:count])
                grad_x.index_add_(0, own, grad_rows.to(total_dtype))
    if grad_x is not None:
        grads["x"] = grad_x.to(x.dtype)
    if grad_weights is not None:
        grads["top_k_weights"] = grad_weights.view(top_k_weights.shape)
    return grads


Matrices = Tensor | DequantisedMatrices


def _projections(call: Call) -> tuple[Matrices, Matrices]:
    """What gives an expert's matrices `[inputs, outputs]` of x's dtype, by its number."""
    up = multiplied(call.gate_up_proj, call.gate_up_scale, call.transposed)
    down = multiplied(call.down_proj, call.down_scale, call.transposed)
    return matrices(*up, call.x.dtype), matrices(*down, call.x.dtype)


def _sizes(call: Call) -> tuple[int, int]:
    outputs = 2 if call.transposed else 1
    return call.gate_up_proj.shape[outputs], call.down_proj.shape[3 - outputs]


def _blocks(offsets: Tensor) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cut the rows into blocks of about `_BLOCK`: (first row, the experts, how many rows each has in it)."""
    begin, owners, sizes = 0, list[int](), list[int]()
    for expert, first, last in segments(offsets):
        parts = max(1, round((last - first) / _BLOCK))
        for part in range(parts):
            start, end = (first + (last - first) * i // parts for i in (part, part + 1))
            if owners and end - begin > _BLOCK:
                yield begin, owners, sizes
                owners, sizes = [], []
            if not owners:
                begin = start
            owners.append(expert)
            sizes.append(end - start)
    if owners:
        yield begin, owners, sizes


def _products(
    x: Tensor, weight: Matrices, bias: Tensor | None, out: Tensor, owners: list[int], sizes: list[int]
) -> None:
    """`out = x @ weight[expert] + bias[expert]` for each expert's rows of a block."""
    for expert, rows, product in zip(owners, x.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True):
        if bias is not None:
            torch.addmm(bias[expert], rows, weight[expert], out=product)
        elif rows.shape[0] == 1 and rows.dtype is torch.bfloat16:
            # Two rows take a faster way through oneDNN than one does.
            product.copy_(torch.mm(rows.expand(2, -1), weight[expert])[:1])
        elif 2 <= rows.shape[0] <= 3 and rows.dtype is torch.float32:
            # BLAS reads the matrix up to twice as fast from this side.
            product.copy_(torch.mm(weight[expert].t(), rows.t()).t())
        else:
            torch.mm(rows, weight[expert], out=product)


def _plus(rows: Tensor, bias: Tensor, out: Tensor, owners: list[int], sizes: list[int]) -> Tensor:
    """`out = rows + bias[expert]` for each expert's rows of a block."""
    for expert, own, into in zip(owners, rows.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True):
        torch.add(own, bias[expert], out=into)
    return out


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-wise inner product `[rows]`, summed in `dtype`."""
    if a.dtype is dtype:
        return torch.linalg.vecdot(a, b)  # type: ignore[no-any-return]
    return (a * b).sum(1, dtype=dtype)


def _wgrad_out(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """`out = x^T grad`, computed in the memory order of `out`."""
    if out.stride(0) < out.stride(1):
        torch.mm(grad.t(), x, out=out.t())
    else:
        torch.mm(x.t(), grad, out=out)
