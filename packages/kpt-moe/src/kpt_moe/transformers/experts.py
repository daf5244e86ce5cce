"""The experts of Hugging Face models, by KPT's ops; of FP8 ones, weights stay 8-bit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kpt_core import InputError
from kpt_core.shared_config import warn_of_switch
from kpt_moe._dtypes import FLOAT8, NAMES_OF_FLOAT8
from kpt_moe._pairs import SortedPairs
from kpt_moe._scales import SCALE_BLOCK, SCALE_DTYPES, dequantise, in_blocks
from kpt_moe.composed_experts import composed_experts
from kpt_moe.conversion.experts import options_of
from kpt_moe.experts import ACTIVATIONS, experts
from kpt_moe.hf_modules import has_post_norm, parameter_names
from kpt_moe.routing import Routing
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

from .activation import known_activation

#: The name to give as `experts_implementation`.
NAME = "kpt"
_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_DEQUANTISE = "load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"


def kpt_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the forward of a transformers experts module, by KPT's ops.

    Args:
        self: a module whose class is decorated with transformers' `use_experts_implementation`.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: `[tokens, top_k]`; under expert parallelism ids at or above `num_experts` are not here.
        top_k_weights: `[tokens, top_k]`.

    Returns:
        `[tokens, hidden_size]` of hidden_states' dtype.
    """
    warn_of_switch(self, "_experts_implementation", NAME, getattr(self, "layer_idx", None))
    held = {ours: getattr(self, theirs) for ours, theirs in parameter_names(self).items()}
    return _by_numbers(self, hidden_states, top_k_index, top_k_weights, held)


def _by_numbers(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, held: dict[str, Tensor]
) -> Tensor:
    """Run experts whose weights are numbers, by their names in `moe.experts`."""
    x = hidden_states.to(held["down_proj"].dtype)
    options: dict[str, Any] = {**held, "transposed": module.is_transposed}
    activation = None if has_post_norm(module) else known_activation(module)
    if activation is not None:
        out = experts(x, top_k_index, top_k_weights, **options, **options_of(activation))
    else:
        gating = module._apply_gate if module.has_gate else module.act_fn
        norm = module.post_expert_norm if has_post_norm(module) else None
        out = composed_experts(x, top_k_index, top_k_weights, **options, activation=gating, post_norm=norm)
    return out.to(hidden_states.dtype)


def kpt_fp8_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run as `kpt_experts_forward` does, for transformers' `FP8Experts`.

    Products are those of the dequantised weights. Where the checkpoint asks for dynamic activation scales, a kernel of
    a device that multiplies 8-bit numbers may round activations to them, of many tokens and without gradients; else
    activations stay as they come. Static scales are not applied. Weights are frozen: gradients reach the tokens and the
    routing.

    Weights are float8_e4m3fn with scales of blocks of 128 by 128, rows, or one for each matrix, float32 or powers of
    two in float8_e8m0fnu; or they were dequantised. In checkpoints, the gate's and the up projection's matrix have
    blocks of their own. So in `gate_up_proj_scale_inv` the blocks of the second half begin anew, and where
    `intermediate_size` is no multiple of 128, each half is a product of its own.

    Args:
        self: a module of transformers' class `FP8Experts`.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: `[tokens, top_k]`.
        top_k_weights: `[tokens, top_k]`.

    Returns:
        `[tokens, hidden_size]` of hidden_states' dtype.

    Raises:
        InputError: the weights or their scales are in another format.
    """
    warn_of_switch(self, "_experts_implementation", NAME, getattr(self, "layer_idx", None))
    module: Any = self
    if is_parametrized(self):
        adapted = _adapted(module, hidden_states.dtype)
        return _by_numbers(module, hidden_states, top_k_index, top_k_weights, adapted)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = getattr(module, name), _bias(module, name)
    down, down_bias = module.down_proj, _bias(module, "down_proj")
    if up.dtype.is_floating_point and up.dtype.itemsize > 1:
        refuse_widened(module, name)
        return kpt_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    refusal = refusal_of(module.block_size)
    if refusal is not None:
        raise InputError(refusal)
    halves = 2 if module.has_gate else 1
    up, up_scale = _frozen(module, name, halves)
    down, down_scale = _frozen(module, "down_proj", 1)
    whole = halves == 1 or up_scale.dim() == 2 or up.shape[1] % (halves * SCALE_BLOCK) == 0
    activation = known_activation(module) if whole else None
    if activation is not None:
        out = experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            up,
            down,
            up_bias,
            down_bias,
            **options_of(activation),
            gate_up_scale=up_scale,
            down_scale=down_scale,
            activations=_roundable(module),
        )
        return out.to(hidden_states.dtype)
    pairs = SortedPairs.of(Routing(top_k_index, top_k_weights, logits=top_k_weights), up.shape[0])
    rows = pairs.gather(hidden_states)
    parts = 1 if whole else halves
    products = zip(up.chunk(parts, 1), up_scale.chunk(parts, 1), strict=True)
    h = _biased(torch.cat([_product(rows, *part, pairs) for part in products], 1), up_bias, pairs)
    y = _product(module._apply_gate(h) if module.has_gate else module.act_fn(h), down, down_scale, pairs)
    return pairs.combine(_biased(y, down_bias, pairs), hidden_states).to(hidden_states.dtype)


def _roundable(module: Any) -> str:
    """Return what activations may be rounded by: kpt-fp8's experts name it, transformers' say when."""
    if any(getattr(module, f"{name}_activation_scale", None) is not None for name in ("gate_up_proj", "down_proj")):
        return "none"
    dynamic = getattr(module, "activation_scheme", None) == "dynamic"
    named = getattr(module, "activations", ("1x128" if module.block_size else "row") if dynamic else "none")
    return named if named in ACTIVATIONS and getattr(module, "input_bound", None) is None else "none"


def refuse_widened(module: Any, name: str) -> None:
    """Raise `InputError` if codes became numbers of a wider dtype while their scales lay beside them."""
    if getattr(module, f"{name}_scale_inv", None) is not None:
        raise InputError(
            f"{type(module).__name__}: {name} holds 8-bit codes that .to(dtype) made {getattr(module, name).dtype}, "
            f"without their scales: load the model again and give from_pretrained the dtype; or {_DEQUANTISE}"
        )


def refusal_of(block_size: Sequence[int] | None, expert_dtype: str = "fp8") -> str | None:
    """Why KPT does not serve a format of FP8 experts, or None; no block size means one scale for each matrix."""
    if expert_dtype == "fp8" and (block_size is None or list(block_size) == _BLOCK):
        return None
    return (
        f"experts_implementation={NAME!r}: FP8 experts must have 8-bit weights with scales of blocks of {_BLOCK}, or "
        f"one for each matrix (None); got expert_dtype={expert_dtype!r} and weight_block_size={block_size}: "
        f"{_DEQUANTISE}"
    )


def _adapted(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights as numbers, with what adapters add to them (peft, for parameters): codes can't take it."""
    found: dict[str, Any] = {}
    for ours, name in parameter_names(module).items():
        if ours.endswith("_bias"):
            found[ours] = _bias(module, name.removesuffix("_bias"))
            continue
        chain = getattr(module.parametrizations, name, ())
        weight = chain.original if chain else getattr(module, name)
        if weight.dtype in FLOAT8:
            halves = 2 if module.has_gate and ours == "gate_up_proj" else 1
            codes, scale = _frozen(module, name, halves, weight)
            scale = scale if scale.dim() == 3 else scale.unsqueeze(2)
            parts = zip(codes.chunk(halves, 1), scale.chunk(halves, 1), strict=True)
            weight = torch.cat([dequantise(*part, torch.float32).to(dtype) for part in parts], 1)
        for added in chain:
            weight = added(weight)
        found[ours] = weight
    return found


def _frozen(module: Any, name: str, halves: int, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes of a projection and their scales, as `moe.experts` takes them; `InputError` if they are others."""
    codes = (getattr(module, name) if codes is None else codes).detach()
    scale = getattr(module, f"{name}_scale_inv").detach()
    if codes.dtype not in FLOAT8:
        raise InputError(
            f"experts_implementation={NAME!r}: {name} of FP8 experts must be {NAMES_OF_FLOAT8}; got {codes.dtype}: "
            f"{_DEQUANTISE}"
        )
    num_experts, outputs, inputs = codes.shape
    if module.block_size is None:
        shapes = [num_experts, halves, 1]
        fits = scale.numel() in (num_experts, num_experts * halves, num_experts * outputs)
    else:
        shapes = [num_experts, halves * in_blocks(outputs // halves)[0], in_blocks(inputs)[0]]
        fits = list(scale.shape) == shapes
    if not fits:
        raise InputError(
            f"experts_implementation={NAME!r}: {name}_scale_inv must be {shapes} for {name} {list(codes.shape)} with "
            f"weight_block_size={module.block_size}; got {list(scale.shape)}: load the checkpoint with "
            "kpt_fp8.transformers.load"
        )
    # Powers of two have a dtype of their own, and some checkpoints have scales of bfloat16.
    scale = scale if scale.dtype in SCALE_DTYPES else scale.float()
    if module.block_size is None:
        scale = scale.reshape(num_experts, -1)
        scale = scale.repeat_interleave(outputs // scale.shape[1], 1)
    return codes, scale


def _bias(module: Any, name: str) -> Any:
    """Return the bias of a projection; kpt-fp8's experts give it in the order of their weights."""
    own = getattr(module, "bias", None)
    return own(name) if callable(own) else getattr(module, f"{name}_bias", None)


def _product(rows: Tensor, codes: Tensor, scale: Tensor, pairs: SortedPairs) -> Tensor:
    return scaled_grouped_mm(rows, codes.mT, scale if scale.dim() == 2 else scale.mT, pairs.offsets)


def _biased(rows: Tensor, bias: Tensor | None, pairs: SortedPairs) -> Tensor:
    return rows if bias is None else rows + bias[pairs.expert]
