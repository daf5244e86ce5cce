"""What op `moe.experts` refuses."""

import torch
from torch import Tensor

from kpt_core import Call, InputError

from ._dtypes import DTYPES, FLOAT8, NAMES_OF_DTYPES, NAMES_OF_FLOAT8
from ._scales import SCALE_DTYPES, has_one_of, in_blocks, one_of
from .activations import GATED, activation_of
from .scaled_grouped_mm import require_frozen


def check_experts(call: Call) -> None:
    """Raise unless the arguments of `moe.experts` fit each other.

    Raises:
        InputError: a shape, dtype or device does not fit, or quantised weights require a gradient.
        UnknownNameError: no such activation.
    """
    x, top_k_index, top_k_weights, gate_up_proj, down_proj, *biases = call[:7]
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
    if top_k_index.device != x.device or top_k_weights.device != x.device:
        raise InputError(
            f"moe.experts: x is on {x.device}, but top_k_index on {top_k_index.device} "
            f"and top_k_weights on {top_k_weights.device}"
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
            "quantise it (kpt_moe.quantised_experts.quantise_weights), or leave the scale out"
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
