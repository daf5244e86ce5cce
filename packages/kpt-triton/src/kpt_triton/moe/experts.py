"""The experts of a Mixture-of-Experts layer: gather, gate and up projection, activation, down projection, weighted sum.

Training saves the pre-activation and the sorted order beside the arguments, and nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from kpt_triton.chips import chip_of
from kpt_triton.fp8.quantize import quantize_rows
from kpt_triton.launching import as_read, inner_contiguous, on_its_device

from .combine import combine, segment_sum
from .decode import decode
from .experts_backward import multiply_and_differentiate
from .experts_forward import Gating, multiply_and_activate
from .grouped_mm import multiply
from .launching import codes_of, scales_of
from .sorting import position_of, sort_pairs
from .tiles import product_of, tile_for
from .transposed import gradient_of

#: Up to so many tokens are computed pair by pair, unless several of them are likely to share an expert.
_FEW_TOKENS = 8
#: With more rows an expert than this, activations are rounded to 8 bits where a call allows it. With fewer, what takes
#: time is reading weights, of which no bit is saved: 32 rows are 64 operations a byte, and chips do 100 to 600.
MOST_ROWS_EXACT = 32
_E4M3 = torch.float8_e4m3fn


def is_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether so many tokens are computed pair by pair: an expert of two of them would be read twice."""
    return tokens == 1 or (0 < tokens <= _FEW_TOKENS and tokens * top_k * 4 <= experts)


def rounds(call: Any) -> bool:
    """Tell whether activations are rounded to 8 bits: where it is allowed, and units multiply them faster so."""
    if call.activations == "none" or call.needs or call.x.dtype is not torch.bfloat16:
        return False
    if call.top_k_index.numel() <= MOST_ROWS_EXACT * call.gate_up_proj.shape[0]:
        return False
    chip = chip_of(call.x.device)
    return all(
        codes_of(_E4M3, weight.dtype, "n", call.x.dtype, chip) != "" for weight in (call.gate_up_proj, call.down_proj)
    )


@on_its_device
def forward(call: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Op `moe.experts` for x in float32, bfloat16 and float16, with float32 sums.

    Args:
        call: the call of the op. Its configuration may name tiles as `kpt_triton.tile.Tile` writes them: `up` of the
            gate and up projection, `down` of the down projection and of the gradient of the input, `slope` of the
            gradient behind the down projection, `wgrad` of the gradients of both projections.

    Returns:
        `[tokens, hidden_size]` of x's dtype; and if gradients are needed the pre-activation without its bias, the order
        of the sorted rows, and where each expert's end.
    """
    x, weights, act = call.x, call.top_k_weights.contiguous(), _gating(call)
    up, down, up_scale, down_scale = _matrices(call)
    up_bias, down_bias = _contiguous(call.gate_up_proj_bias), _contiguous(call.down_proj_bias)
    tokens, top_k = call.top_k_index.shape
    # Weights whose columns are contiguous would be read in pieces of two bytes, pair by pair.
    fast = up.stride(1) == 1 and down.stride(1) == 1 and down.shape[1] > 0
    if not call.needs and fast and is_few(tokens, top_k, up.shape[0]):
        index = call.top_k_index.contiguous()
        return decode(x, index, weights, up, down, up_bias, down_bias, up_scale, down_scale, act), ()
    order, position, offsets = sort_pairs(call.top_k_index, up.shape[0])
    rows, save = order.shape[0], bool(call.needs)
    rounding = rounds(call)
    read, x_scale = quantize_rows(x, call.activations) if rounding else (x, None)
    tile = tile_for(act.product_of_codes if rounding else act.product, x, rows, up.shape, call.config, "up")
    activated, h = multiply_and_activate(
        read, up, order, offsets, top_k, act, tile, bias=up_bias, scale=up_scale, x_scale=x_scale, out_dtype=x.dtype,
        save=save,
    )  # fmt: skip
    activated, of_rows = quantize_rows(activated, call.activations) if rounding else (activated, None)
    product = "crowded_codes" if rounding else product_of(scales_of(down_scale, down))
    tile = tile_for(product, x, rows, down.shape, call.config, "down")
    y = multiply(
        activated, down, offsets, tile, order=order, weights=weights, bias=down_bias, scale=down_scale,
        x_scale=of_rows, out_dtype=x.dtype,
    )  # fmt: skip
    return _sum_choices(y, position, offsets, x, top_k), (h, order, offsets) if save else ()


@on_its_device
def backward(call: Any, saved: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are wanted.

    Args:
        call: the call of `forward`.
        saved: the pre-activation, the order and the ends; the order within an expert may be any.
        grad: of the output.
    """
    x, weights, act, needs = call.x, call.top_k_weights.contiguous(), _gating(call), call.needs
    up, down, up_scale, down_scale = _matrices(call)
    h, order, offsets = (tensor.contiguous() for tensor in saved)
    grad, position = inner_contiguous(grad), position_of(order)
    rows, top_k = order.shape[0], weights.shape[1]
    down_scale = None if down_scale is None else down_scale.mT
    grad_h, weighted, dots = multiply_and_differentiate(
        grad,
        down.mT,
        h,
        weights,
        order,
        offsets,
        act,
        tile_for("slope", x, rows, down.shape, call.config, "slope"),
        need_h=any(name in needs for name in ("x", "gate_up_proj", "gate_up_proj_bias")),
        need_weighted="down_proj" in needs,
        need_dots="top_k_weights" in needs,
        bias=_contiguous(call.gate_up_proj_bias),
        scale=down_scale,
    )
    gathered: dict[str, Any] = {"order": order, "top_k": top_k}
    grads = {}
    if "top_k_weights" in needs:
        of_pairs = dots[position]
        if call.down_proj_bias is not None:
            by_expert = grad.float() @ call.down_proj_bias.float().t()
            owner = torch.searchsorted(offsets, position, right=True).clamp_(max=offsets.shape[0] - 1)
            of_pairs = of_pairs + by_expert.gather(1, owner.view_as(weights)).flatten()
        grads["top_k_weights"] = torch.where(position < offsets[-1:], of_pairs, 0).view_as(weights).to(weights.dtype)
    if "down_proj" in needs:
        found = gradient_of(down, weighted, grad, offsets, call.config, gather_grad=True, **gathered)
        grads["down_proj"] = found if call.transposed else found.mT
    if "gate_up_proj" in needs:
        found = gradient_of(up, x, grad_h, offsets, call.config, gather_x=True, **gathered)
        grads["gate_up_proj"] = found if call.transposed else found.mT
    if "gate_up_proj_bias" in needs:
        grads["gate_up_proj_bias"] = segment_sum(grad_h, offsets, None, x.dtype)
    if "down_proj_bias" in needs:
        pairs = order.long()
        of_rows = weights.flatten()[pairs]
        grads["down_proj_bias"] = segment_sum(grad[pairs // top_k], offsets, of_rows, x.dtype)
    if "x" in needs:
        up_scale = None if up_scale is None else up_scale.mT
        tile = tile_for(product_of(scales_of(up_scale, up.mT)), x, rows, up.shape, call.config, "down")
        of_rows = multiply(grad_h, up.mT, offsets, tile, scale=up_scale)
        grads["x"] = _sum_choices(of_rows, position, offsets, x, top_k)
    return grads


def _gating(call: Any) -> Gating:
    return Gating(call.activation, call.interleaved, call.alpha, call.beta, call.limit)


def _matrices(call: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Both projections `[experts, K, N]` as they multiply, and their scales `[experts, a, b]`."""

    def of(scale: Tensor | None) -> Tensor | None:
        if scale is None or scale.dim() == 2:
            return None if scale is None else scale.float().unsqueeze(1)
        return scale.float() if call.transposed else scale.float().mT

    up, down = as_read(call.gate_up_proj), as_read(call.down_proj)
    if not call.transposed:
        up, down = up.mT, down.mT
    return up, down, of(call.gate_up_scale), of(call.down_scale)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _sum_choices(rows: Tensor, position: Tensor, offsets: Tensor, x: Tensor, top_k: int) -> Tensor:
    if rows.numel() == 0:
        return x.new_zeros(x.shape[0], rows.shape[1])
    return combine(rows, position, offsets, None, top_k, x.dtype)
