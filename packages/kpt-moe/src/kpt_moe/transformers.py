"""Serve the experts of Hugging Face models: importing this module registers the experts implementation `"kpt"`.

    import kpt_moe.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="kpt")
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import activations as hf_activations
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from .activations import Activation
from .composed_experts import composed_experts
from .experts import experts

#: The name to give as `experts_implementation`.
NAME = "kpt"

_SWIGLU = "swiglu"
#: transformers' activation modules that are one of ours, by type; those of torch.nn are read from their fields.
_PLAIN_BY_TYPE: dict[type, str] = {
    nn.SiLU: "silu",
    hf_activations.SiLUActivation: "silu",
    hf_activations.GELUActivation: "gelu",
    hf_activations.GELUTanh: "gelu_tanh",
    nn.ReLU: "relu",
    hf_activations.ReLUSquaredActivation: "relu2",
}
_GATED_BY_PLAIN = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


def kpt_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a transformers experts module, by KPT's ops.

    Args:
        self: a module whose class is decorated with transformers' `use_experts_implementation`.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: `[tokens, top_k]`; under expert parallelism ids at or above `num_experts` are not here.
        top_k_weights: `[tokens, top_k]`.

    Returns:
        `[tokens, hidden_size]` of hidden_states' dtype.
    """
    module: Any = self
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up_bias = getattr(module, f"{up_name}_bias") if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    x = hidden_states.to(up.dtype)
    activation = None if module.has_post_expert_norm else known_activation(module)
    if activation is not None:
        out = experts(
            x,
            top_k_index,
            top_k_weights,
            up,
            module.down_proj,
            up_bias,
            down_bias,
            activation=activation.name,
            transposed=module.is_transposed,
            interleaved=activation.interleaved,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
        )
    else:
        out = composed_experts(
            x,
            top_k_index,
            top_k_weights,
            up,
            module.down_proj,
            up_bias,
            down_bias,
            activation=module._apply_gate if module.has_gate else module.act_fn,
            post_norm=module.post_expert_norm if module.has_post_expert_norm else None,
            transposed=module.is_transposed,
        )
    return out.to(hidden_states.dtype)


def known_activation(module: Any) -> Activation | None:
    """Which of our activations an experts module applies, or None if it is one of its own.

    A module that overrides `_apply_gate` is asked what it does to a few numbers, since its class says nothing.
    """
    cached = module.__dict__.get("_kpt_activation", module)
    if cached is not module:
        return cached  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        return _identify_constant(module)  # type: ignore[no-any-return]
    found = _identify(module)
    # Not a module attribute proper: it must not show in state_dict, repr or children.
    module.__dict__["_kpt_activation"] = found
    return found


def _identify(module: Any) -> Activation | None:
    plain = _plain_name(getattr(module, "act_fn", None))
    if not module.has_gate:
        return None if plain is None else Activation(plain)
    if type(module)._apply_gate is _default_apply_gate:
        return Activation(_GATED_BY_PLAIN[plain]) if plain in _GATED_BY_PLAIN else None
    limit = _number(module, "limit", "swiglu_limit")
    alpha = _number(module, "alpha", "swiglu_alpha")
    interleaved = not module.is_concatenated
    for candidate in (
        Activation(_SWIGLU, alpha or 1.0, 1.0, limit, interleaved),
        Activation(_SWIGLU, alpha or 1.0, 0.0, limit, interleaved),
    ):
        if _same(module, candidate):
            return candidate
    return None


@torch._dynamo.assume_constant_result  # type: ignore[no-untyped-call,untyped-decorator]
def _identify_constant(module: Any) -> Activation | None:
    return _identify(module)


def _plain_name(act_fn: Any) -> str | None:
    if act_fn is F.silu:
        return "silu"
    if isinstance(act_fn, nn.GELU):
        return "gelu" if act_fn.approximate == "none" else "gelu_tanh"
    if type(act_fn) is hf_activations.GELUActivation and act_fn.act is not F.gelu:
        return None
    return _PLAIN_BY_TYPE.get(type(act_fn))


def _number(module: Any, *names: str) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


def _same(module: Any, candidate: Activation) -> bool:
    """Whether the module's gating equals `candidate` on a grid that crosses its limits, to float64's accuracy."""
    reach = 2 * (candidate.limit or 4.0)
    points = torch.linspace(-reach, reach, 33, dtype=torch.float64)
    gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
    pair = torch.stack((gate, up), dim=-1)
    h = pair.flatten().unsqueeze(0) if candidate.interleaved else torch.cat((gate, up)).unsqueeze(0)
    with torch.no_grad():
        return torch.allclose(module._apply_gate(h), candidate(h), rtol=1e-12, atol=1e-12)


ExpertsInterface.register(NAME, kpt_experts_forward)
