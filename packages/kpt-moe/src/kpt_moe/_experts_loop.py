"""`moe.experts` for tensors in host memory: one expert after the other, in blocks of rows that stay in cache.

Large temporaries are avoided because fresh pages cost more here than the arithmetic on them: outside of training no
buffer has more than `_BLOCK` rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._loops import _library, segments
from ._scaled import DequantisedMatrices, matrices
from .activations import Activation

#: Rows of one block: enough for the matrix product to reach its rate, few enough for its result to stay in cache.
_BLOCK = 1024

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_ACTIVATION = "str activation, float alpha, float beta, float? limit, bool interleaved"
_SCALES = "Tensor? up_scale=None, Tensor? down_scale=None"
_library.define(
    "experts(Tensor x, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    f"Tensor order, Tensor offsets, {_ACTIVATION}, bool training, {_SCALES}) -> (Tensor, Tensor)"
)
_library.define(
    "experts_backward(Tensor grad, Tensor x, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    f"Tensor? down_bias, Tensor order, Tensor offsets, Tensor h, {_ACTIVATION}, bool[] needed, {_SCALES}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


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
    """Returns the output `[tokens, hidden_size]` and, if training, the pre-activation `[rows, width]`."""
    parts = (act.name, act.alpha, act.beta, act.limit, act.interleaved)
    return torch.ops.kpt_moe.experts.default(  # type: ignore[no-any-return]
        x, top_k_weights, up, down, up_bias, down_bias, order, offsets, *parts, training, up_scale, down_scale
    )


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
    parts = (act.name, act.alpha, act.beta, act.limit, act.interleaved)
    needed = tuple(need and t is not None for need, t in zip(needed, (x, x, x, x, up_bias, down_bias), strict=True))
    tensors = (grad, x, top_k_weights, up, down, up_bias, down_bias, order, offsets, h)
    grads = torch.ops.kpt_moe.experts_backward.default(*tensors, *parts, list(needed), up_scale, down_scale)
    return tuple(g if need else None for need, g in zip(needed, grads, strict=True))  # type: ignore[return-value]


@torch.library.impl(_library, "experts", "CPU")
def _experts(
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    training: bool,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        act = Activation(activation, alpha, beta, limit, interleaved)
        total_dtype = sum_dtype(x)
        out = torch.zeros(x.shape, dtype=total_dtype)
        tokens = order // top_k_weights.shape[1]
        weights = top_k_weights.reshape(-1, 1).to(total_dtype).index_select(0, order)
        blocks = list(_blocks(offsets))
        most = max((sum(sizes) for _, _, sizes in blocks), default=0)
        h_all = x.new_empty(order.shape[0] if training else most, up.shape[2])
        a_block, y_block = x.new_empty(most, down.shape[1]), x.new_empty(most, down.shape[2])
        up_matrices, down_matrices = matrices(up, up_scale, x.dtype), matrices(down, down_scale, x.dtype)
        for first, owners, sizes in blocks:
            rows = sum(sizes)
            own = tokens[first : first + rows]
            h = h_all[first : first + rows] if training else h_all[:rows]
            a, y = a_block[:rows], y_block[:rows]
            _products(x.index_select(0, own), up_matrices, up_bias, h, owners, sizes)
            _products(act.into(h, a), down_matrices, down_bias, y, owners, sizes)
            w = weights[first : first + rows]
            if x.shape[0] == 1:
                # Decode: a product of its own size, where adding by index wakes every thread for a few rows.
                out.addmm_(w.t(), y.to(total_dtype))
            else:
                out.index_add_(0, own, y.mul_(w) if y.dtype is total_dtype else y * w)
        if not training:
            return out.to(x.dtype), x.new_empty(0)
        h_all[int(offsets[-1]) :].zero_()
        return out.to(x.dtype), h_all


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
    x: Tensor,
    weight: Tensor | DequantisedMatrices,
    bias: Tensor | None,
    out: Tensor,
    owners: list[int],
    sizes: list[int],
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


@torch.library.impl(_library, "experts_backward", "CPU")
def _experts_backward(
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
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    needed: list[bool],
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    with torch.no_grad():
        act = Activation(activation, alpha, beta, limit, interleaved)
        total_dtype = sum_dtype(x)
        grad_x = torch.zeros(x.shape, dtype=total_dtype) if need_x else _nothing(x)
        grad_weights = top_k_weights.new_zeros(top_k_weights.numel()) if need_weights else _nothing(x)
        grad_up = _zeros_ordered_as(up) if need_up else _nothing(x)
        grad_down = _zeros_ordered_as(down) if need_down else _nothing(x)
        grad_up_bias = torch.zeros_like(up_bias) if need_up_bias and up_bias is not None else _nothing(x)
        grad_down_bias = torch.zeros_like(down_bias) if need_down_bias and down_bias is not None else _nothing(x)
        tokens = order // top_k_weights.shape[1]
        weights = top_k_weights.reshape(-1, 1).to(total_dtype)[order]
        up_matrices, down_matrices = matrices(up, up_scale, x.dtype), matrices(down, down_scale, x.dtype)
        parts = list(segments(offsets))
        # What every expert needs for a while, made once: fresh pages cost more than the arithmetic on them.
        most = max((end - start for _, start, end in parts), default=0)
        x_all, y_all = (x.new_empty(most, x.shape[1]) for _ in range(2))
        a_all, grad_a_all = (x.new_empty(most, down.shape[1]) for _ in range(2))
        grad_h_all = x.new_empty(most, up.shape[2]) if act.gated else grad_a_all
        for expert, start, end in parts:
            rows, count = tokens[start:end], end - start
            h_e, w_e = h[start:end], weights[start:end]
            grad_y = torch.index_select(grad, 0, rows, out=y_all[:count])
            a = act.into(h_e, a_all[:count])
            grad_a = torch.mm(grad_y, down_matrices[expert].t(), out=grad_a_all[:count])
            if need_weights:
                per_row = _dot(grad_a, a, total_dtype)
                if down_bias is not None:
                    per_row += _dot(grad_y, down_bias[expert].expand_as(grad_y), total_dtype)
                grad_weights.index_copy_(0, order[start:end], per_row.to(grad_weights.dtype))
            w_own = w_e.to(x.dtype)
            if need_down:
                _wgrad_out(a.mul_(w_own), grad_y, grad_down[expert])
            if need_down_bias:
                grad_down_bias[expert] = (grad_y * w_e).sum(0)
            if need_x or need_up or need_up_bias:
                grad_h = act.backward_into(grad_a.mul_(w_own), h_e, grad_h_all[:count])
                if need_up:
                    _wgrad_out(torch.index_select(x, 0, rows, out=x_all[:count]), grad_h, grad_up[expert])
                if need_up_bias:
                    grad_up_bias[expert] = grad_h.sum(0, dtype=total_dtype)
                if need_x:
                    grad_rows = torch.mm(grad_h, up_matrices[expert].t(), out=y_all[:count])
                    grad_x.index_add_(0, rows, grad_rows.to(total_dtype))
        grad_x = grad_x.to(x.dtype)
        if need_weights:
            grad_weights = grad_weights.view(top_k_weights.shape)
        return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


@torch.library.register_fake("kpt_moe::experts", lib=_library)  # type: ignore[untyped-decorator]
def _experts_fake(
    x: Tensor, top_k_weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    order: Tensor, offsets: Tensor, activation: str, alpha: float, beta: float, limit: float | None,
    interleaved: bool, training: bool, up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(order.shape[0], up.shape[2]) if training else x.new_empty(0)


@torch.library.register_fake("kpt_moe::experts_backward", lib=_library)  # type: ignore[untyped-decorator]
def _experts_backward_fake(
    grad: Tensor, x: Tensor, top_k_weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, order: Tensor, offsets: Tensor, h: Tensor, activation: str, alpha: float, beta: float,
    limit: float | None, interleaved: bool, needed: list[bool], up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad_weights = top_k_weights.new_empty(top_k_weights.shape)
    likes = (x.new_empty(x.shape), grad_weights, _zeros_ordered_as(up), _zeros_ordered_as(down))
    biases = (torch.empty_like(b) if b is not None else _nothing(x) for b in (up_bias, down_bias))
    return tuple(t if need else _nothing(x) for need, t in zip(needed, (*likes, *biases), strict=True))


def _nothing(x: Tensor) -> Tensor:
    """The place of a gradient that nobody needs; a new tensor each time, since outputs of an op may not be one."""
    return x.new_empty(0)


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums of `x`'s elements are taken in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-wise inner product `[rows]`, summed in `dtype`."""
    if a.dtype is dtype:
        return torch.linalg.vecdot(a, b)  # type: ignore[no-any-return]
    return (a * b).sum(1, dtype=dtype)


def _zeros_ordered_as(weight: Tensor) -> Tensor:
    """Zeros of `weight`'s shape and memory order: `[E, K, N]` stored either way."""
    if weight.stride(1) < weight.stride(2):
        return torch.zeros(weight.mT.shape, dtype=weight.dtype, device=weight.device).mT
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)


def _wgrad_out(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """`out = x^T grad`, computed in the memory order of `out`."""
    if out.stride(0) < out.stride(1):
        torch.mm(grad.t(), x, out=out.t())
    else:
        torch.mm(x.t(), grad, out=out)
