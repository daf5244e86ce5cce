"""The experts of a Mixture-of-Experts layer: op `moe.experts`."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kpt_core import Call, op
from kpt_core.policy import next_power_of_two

from ._dtypes import wide_dtype
from ._experts_check import check_experts
from ._scales import dequantise, multiplied
from .activations import Activation
from .grouped_mm import grouped_mm
from .permutation import sort_by_expert
from .scaled_grouped_mm import scaled_grouped_mm


def _fake(call: Call) -> Tensor:
    return call.x.new_empty(call.x.shape)  # type: ignore[no-any-return]


def _saves(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """What backward needs beside the arguments.

    The pre-activation without its bias `[pairs, width]` of x's dtype, in sorted order, anything in rows of no expert;
    the order `[pairs]` int32: sorted row `j` is pair `order[j]`, pairs of no expert last; and the end row of each
    expert, `[num_experts]` int32.
    """
    order, offsets = sort_by_expert(call.top_k_index, call.gate_up_proj.shape[0])
    rows = call.x[order // call.top_k_index.shape[1]]
    up, scale = multiplied(call.gate_up_proj, call.gate_up_scale, call.transposed)
    h = grouped_mm(rows, up, offsets) if scale is None else scaled_grouped_mm(rows, up, scale, offsets)
    return h, order.int(), offsets


def _flops(call: Call) -> int:
    matrices = math.prod(call.gate_up_proj.shape[1:]) + math.prod(call.down_proj.shape[1:])
    return 2 * math.prod(call.top_k_index.shape) * matrices  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Tokens, rounded since they vary from call to call; top_k, experts, hidden size, width; and the layout."""
    width = call.gate_up_proj.shape[2 if call.transposed else 1]
    layout = "transposed" if call.transposed else "plain"
    if call.gate_up_scale is not None or call.down_scale is not None:
        layout += " float8"
    tokens, top_k = call.top_k_index.shape
    return next_power_of_two(tokens), top_k, call.gate_up_proj.shape[0], call.x.shape[1], width, layout


def matrices_of(stored: Tensor, scale: Tensor | None, transposed: bool, dtype: torch.dtype) -> Iterable[Tensor]:
    """Each expert's matrix `[inputs, outputs]` of `dtype`."""
    weight, scale = multiplied(stored, scale, transposed)
    if scale is None:
        return weight.unbind(0)
    pairs = zip(weight.unbind(0), scale.unbind(0), strict=True)
    return (dequantise(codes, factor, wide_dtype(dtype)).to(dtype) for codes, factor in pairs)


@op(
    "moe.experts",
    check=check_experts,
    fake=_fake,
    saves=_saves,
    flops=_flops,
    size_key=_size_key,
    autocast=("x", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
)
def experts(
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
    """Send every token through its experts and sum what they give, weighted by the routing.

    `out[t] = sum_k top_k_weights[t, k] * (act(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])` with
    `e = top_k_index[t, k]`.

    Each product, the pre-activation and the activation are rounded to x's dtype; routing weights and the sum over
    choices are in float32 (float64 for float64).

    For backward kernels save the input, the pre-activation, the routing and its sorted order, and nothing else: the
    gradient of the routing weights can be had as `<dA', A>` at the down projection's input (SonicMoE,
    arXiv:2512.14080).

    Args:
        x: `[tokens, hidden_size]`; float64, float32, bfloat16 or float16.
        top_k_index: `[tokens, top_k]` int64 or int32. Pairs with a negative id or one at or above the number of
            experts (another rank's experts, dropped pairs) contribute nothing and get no gradient.
        top_k_weights: `[tokens, top_k]`, any of the dtypes of x.
        gate_up_proj: `[num_experts, width, hidden_size]`, or `[num_experts, hidden_size, width]` if `transposed`; width
            is `2 * intermediate_size` for gated activations, else `intermediate_size`.
        down_proj: `[num_experts, hidden_size, intermediate_size]`, or its last two exchanged if `transposed`.
        gate_up_proj_bias: `[num_experts, width]`.
        down_proj_bias: `[num_experts, hidden_size]`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        transposed: the matrices are stored as input by output (gpt-oss) rather than output by input (the default).
        interleaved: gate and up rows alternate (gpt-oss) instead of being two halves.
        alpha: factor inside the sigmoid of `swiglu`; this and the next two are for `swiglu` alone.
        beta: what is added to the up projection of `swiglu`.
        limit: bound of gate (above) and up (both sides) in `swiglu`; None for none.
        gate_up_scale: float32 (or float64), what the numbers of a `gate_up_proj` of float8_e4m3fn or float8_e5m2 are
            multiplied by; the products are then those of quantised weights, which are frozen.
            `[num_experts, width]`, one for each output channel, or one for each block of 128 by 128 of the stored
            matrices, `[num_experts, ceil(width / 128), ceil(hidden_size / 128)]` (exchanged if `transposed`), as in
            DeepSeek-V3. None: `gate_up_proj` is not quantised.
        down_scale: likewise of `down_proj`.

    Returns:
        `[tokens, hidden_size]` of x's dtype.

    Raises:
        InputError: a shape, dtype or device does not fit, the activation has no such parameter, or quantised weights
            require a gradient.
        UnknownNameError: no such activation.
    """
    act = Activation(activation, alpha, beta, limit, interleaved)
    wide = wide_dtype(x.dtype)
    tokens, weights = x.to(wide), top_k_weights.to(wide)
    ups = matrices_of(gate_up_proj, gate_up_scale, transposed, x.dtype)
    downs = matrices_of(down_proj, down_scale, transposed, x.dtype)
    out = torch.zeros_like(tokens)
    for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
        chosen = top_k_index == expert
        # Zeros in the place of other tokens, before the products and after them: whatever those hold stays with them.
        own = chosen.any(1, keepdim=True)
        h = torch.where(own, tokens, 0).to(x.dtype) @ up
        h = h if gate_up_proj_bias is None else h + gate_up_proj_bias[expert]
        y = act(torch.where(own, h, 0)) @ down
        y = y if down_proj_bias is None else y + down_proj_bias[expert]
        weight = torch.where(chosen, weights, 0).sum(1, keepdim=True)
        out = out + torch.where(own, y.to(wide) * weight, 0)
    return out.to(x.dtype)
