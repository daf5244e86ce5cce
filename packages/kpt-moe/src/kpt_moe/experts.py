"""The experts of a Mixture-of-Experts layer: op `moe.experts`."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kpt_core import Call, InputError, UnknownNameError, op
from kpt_core.policy import next_power_of_two

from ._dtypes import DTYPES, FLOAT8, NAMES_OF_DTYPES, NAMES_OF_FLOAT8, wide_dtype
from ._scales import SCALE_DTYPES, dequantise, has_one_of, in_blocks, multiplied, one_of
from .activations import GATED, Activation, activation_of
from .grouped_mm import grouped_mm
from .permutation import sort_by_expert
from .scaled_grouped_mm import require_frozen, scaled_grouped_mm

#: What kernels may round activations by, as `fp8.quantize` names it, before they multiply 8-bit weights.
ACTIVATIONS = ("none", "row", "1x128")


def check_experts(call: Call) -> None:
    """Raise unless the arguments of `moe.experts` fit each other."""
    # By name: Dynamo of torch 2.8 can't take a part of a record.
    x, top_k_index, top_k_weights = call.x, call.top_k_index, call.top_k_weights
    gate_up_proj, down_proj, biases = call.gate_up_proj, call.down_proj, (call.gate_up_proj_bias, call.down_proj_bias)
    gated, transposed = call.activation in GATED, call.transposed
    if not gated or call.interleaved or call.alpha != 1.0 or call.beta != 0.0 or call.limit is not None:
        activation_of(call)  # raises
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise InputError(
            f"moe.experts: x must be floating [tokens, hidden_size], of {NAMES_OF_DTYPES}; "
            f"got {x.dtype} {list(x.shape)}"
        )
    if top_k_index.dim() != 2 or top_k_index.shape[0] != x.shape[0] or top_k_weights.shape != top_k_index.shape:
        raise InputError(
            f"moe.experts: top_k_index and top_k_weights must both be [{x.shape[0]}, top_k]; "
            f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
        )
    if top_k_index.dtype not in (torch.int64, torch.int32) or top_k_weights.dtype not in DTYPES:
        raise InputError(
            f"moe.experts: top_k_index must be int64 or int32 and top_k_weights floating, of {NAMES_OF_DTYPES}; "
            f"got {top_k_index.dtype} and {top_k_weights.dtype}"
        )
    if gate_up_proj.dim() != 3 or down_proj.dim() != 3:
        raise InputError(
            "moe.experts: gate_up_proj and down_proj must have three dimensions, the experts first; "
            f"got {list(gate_up_proj.shape)} and {list(down_proj.shape)}"
        )
    num_experts, hidden = gate_up_proj.shape[0], x.shape[1]
    if num_experts == 0:
        raise InputError("moe.experts: gate_up_proj holds no expert, it must hold at least one; got 0")
    width = gate_up_proj.shape[2 if transposed else 1]
    inner = width // 2 if gated else width
    up_shape = [num_experts, hidden, width] if transposed else [num_experts, width, hidden]
    down_shape = [num_experts, inner, hidden] if transposed else [num_experts, hidden, inner]
    if list(gate_up_proj.shape) != up_shape or list(down_proj.shape) != down_shape or (gated and width % 2):
        raise InputError(
            f"moe.experts: with hidden_size {hidden}, activation {call.activation!r} and transposed={transposed}, "
            f"gate_up_proj {list(gate_up_proj.shape)} asks for itself as {up_shape} and for down_proj as {down_shape}; "
            f"got down_proj {list(down_proj.shape)}"
        )
    for name, bias, size in zip(("gate_up", "down"), biases, (width, hidden), strict=True):
        if bias is not None and list(bias.shape) != [num_experts, size]:
            raise InputError(f"moe.experts: {name}_proj_bias must be [{num_experts}, {size}]; got {list(bias.shape)}")
    alike = []
    for name, weight, scale in (("gate_up", gate_up_proj, call.gate_up_scale), ("down", down_proj, call.down_scale)):
        if scale is not None or weight.dtype in FLOAT8:
            _check_quantised(name, weight, scale, x, transposed)
        else:
            alike.append((f"{name}_proj", weight))
    for name, tensor in (*alike, ("gate_up_proj_bias", biases[0]), ("down_proj_bias", biases[1])):
        if tensor is not None and (tensor.dtype is not x.dtype or tensor.device != x.device):
            raise InputError(
                f"moe.experts: {name} must have x's dtype and device ({x.dtype} on {x.device}); "
                f"got {tensor.dtype} on {tensor.device}: convert one of them"
            )
    if call.activations != "none":
        _check_activations(call)
    if top_k_index.device != x.device or top_k_weights.device != x.device:
        raise InputError(
            f"moe.experts: x is on {x.device}, but top_k_index on {top_k_index.device} "
            f"and top_k_weights on {top_k_weights.device}"
        )


def _check_activations(call: Call) -> None:
    if call.activations not in ACTIVATIONS:
        raise UnknownNameError("granularity of activations", call.activations, ACTIVATIONS)
    if call.gate_up_scale is None or call.down_scale is None:
        raise InputError(
            f"moe.experts: activations={call.activations!r} is for weights of 8 bits, both of them; got "
            f"{call.gate_up_proj.dtype} and {call.down_proj.dtype}: leave it out"
        )


def _check_quantised(name: str, weight: Tensor, scale: Tensor | None, x: Tensor, transposed: bool) -> None:
    if scale is None:
        raise InputError(
            f"moe.experts: {name}_proj must have x's dtype ({x.dtype}) unless {name}_scale is given; "
            f"got {weight.dtype} without it"
        )
    if weight.dtype not in FLOAT8:
        raise InputError(
            f"moe.experts: {name}_proj must be {NAMES_OF_FLOAT8} where {name}_scale is given; got {weight.dtype}: "
            "quantise it (kpt_fp8.quantize_to_fp8), or leave the scale out"
        )
    num_experts, *sizes = weight.shape
    shapes = [[num_experts, sizes[1 if transposed else 0]], [num_experts, *in_blocks(*sizes)]]
    if scale.dtype not in SCALE_DTYPES or not has_one_of(scale, shapes):
        raise InputError(
            f"moe.experts: {name}_scale must be float32 or float64 of shape {one_of(shapes)} for {name}_proj "
            f"{list(weight.shape)} and transposed={transposed}; got {scale.dtype} {list(scale.shape)}"
        )
    if weight.device != x.device or scale.device != x.device:
        raise InputError(
            f"moe.experts: x is on {x.device}, but {name}_proj on {weight.device} and {name}_scale on {scale.device}"
        )
    require_frozen("moe.experts", **{f"{name}_proj": weight, f"{name}_scale": scale})


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
        layout += " float8" if call.activations == "none" else f" float8, {call.activations}"
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
    activations: str = "none",
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
        activations: what a kernel may round x and the activation by, to 8 bits as `fp8.quantize` does with scales of
            its own, where it multiplies 8-bit weights faster so: `row`, or `1x128` as DeepSeek-V3 does. It is leave, no
            order: the result specified here is that of numbers as they come, and one of rounded numbers is off by two
            such roundings, 2% to 4% of its size. Where gradients are needed none is rounded. `none`: never.

    Returns:
        `[tokens, hidden_size]` of x's dtype.

    Raises:
        InputError: a shape, dtype or device does not fit, the activation has no such parameter, or quantised weights
            require a gradient.
        UnknownNameError: no such activation, or no such granularity.
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
