"""Serve the experts of Hugging Face models: importing this module registers the experts implementation `"kpt"`.

import kpt_moe.transformers
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="kpt")

What changes models themselves is of `kpt_moe.conversion`, and here by name too: `to_kpt_layers`, `to_transformers`,
`upcycle`.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import activations as hf_activations
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from .activations import Activation
from .composed_experts import composed_experts
from .conversion import to_kpt_layers as to_kpt_layers
from .conversion import to_transformers as to_transformers
from .conversion import upcycle as upcycle
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


def kpt_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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


#: What experts modules with a gating of their own were found to apply, and what they then were. Beside the modules, not
#: in them: a pickled model must not need KPT.
_asked: "WeakKeyDictionary[nn.Module, tuple[Any, Activation | None]]" = WeakKeyDictionary()

#: The parameters, and the module, that an experts module may have for us to know all that its gating depends on.
_PROJECTIONS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
_ACT_FN = "act_fn"
_NUMBERS = frozenset({int, float, bool, str})


def known_activation(module: Any) -> Activation | None:
    """Which of our activations an experts module applies, or None if it is one of its own.

    A module that overrides `_apply_gate` is asked what it does to a few numbers, since its class says nothing; again
    only when one of its own numbers has changed. One that holds more tensors than the projections is not asked: what
    it does today may change with them.
    """
    if torch.compiler.is_compiling():
        # Dynamo knows nothing of what a constant depends on, but guards on what is compared where it looks.
        for name, value in _numbers_constant(module):
            if getattr(module, name) != value:
                return None
        if type(getattr(module, _ACT_FN, None)) is not _act_fn_constant(module):
            return None
        return _identify_constant(module)  # type: ignore[no-any-return]
    return _identify(module)


def _identify(module: Any) -> Activation | None:
    act_fn = getattr(module, _ACT_FN, None)
    plain = _plain_name(act_fn)
    if not module.has_gate:
        return None if plain is None else Activation(plain)
    gate = getattr(module._apply_gate, "__func__", module._apply_gate)
    if gate is _default_apply_gate:
        return Activation(_GATED_BY_PLAIN[plain]) if plain in _GATED_BY_PLAIN else None
    own = vars(module)
    # Of numbers (`training` is one) the values, of everything else the types; and whatever it holds by name.
    state = [value if type(value) in _NUMBERS else type(value) for value in own.values()]
    asked = (plain, gate, state, *own["_parameters"], *own["_buffers"], *own["_modules"])
    before, found = _asked.get(module, (None, None))
    if before != asked:
        known = (act_fn is None or plain is not None) and not _holds_more(module)
        found = _ask(module) if known else None
        _asked[module] = asked, found
    return found


def _holds_more(module: nn.Module) -> bool:
    return bool(
        module._buffers
        or module._parameters.keys() - _PROJECTIONS
        or module._modules.keys() - {_ACT_FN}
        or any(isinstance(value, Tensor) for value in vars(module).values())
    )


def _ask(module: Any) -> Activation | None:
    limit = _number(module, "limit", "swiglu_limit")
    alpha = _number(module, "alpha", "swiglu_alpha") or 1.0
    interleaved = not module.is_concatenated
    candidates = (Activation(_SWIGLU, alpha, beta, limit, interleaved) for beta in (1.0, 0.0))
    return next((candidate for candidate in candidates if _same(module, candidate)), None)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _identify_constant(module: Any) -> Activation | None:
    return _identify(module)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _numbers_constant(module: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in vars(module).items() if type(value) in _NUMBERS)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _act_fn_constant(module: Any) -> type:
    return type(getattr(module, _ACT_FN, None))


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
    """Whether the module's gating equals `candidate` on a grid that crosses its limits, to float64's accuracy.

    The grid goes far beyond them too, where limits would lie that no attribute names.
    """
    reach = 2 * (candidate.limit or 4.0)
    width = module.gate_up_proj.shape[2 if module.is_transposed else 1] // 2
    # Real numbers, also while the model itself is only described (meta device, fake tensors); and a dropout inside must
    # not move the caller's random numbers.
    with torch.no_grad(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        points = torch.linspace(-reach, reach, 33, dtype=torch.float64, device="cpu")
        far = torch.tensor([1e2, 1e4, 1e30], dtype=torch.float64, device="cpu")
        points = torch.cat((points, far, -far))
        pairs = torch.cartesian_prod(points, points)
        rows = -(-len(pairs) // width)
        pairs = pairs[torch.arange(rows * width, device="cpu") % len(pairs)].view(rows, width, 2)
        h = pairs.flatten(1) if candidate.interleaved else torch.cat((pairs[..., 0], pairs[..., 1]), dim=1)
        try:
            return torch.allclose(module._apply_gate(h), candidate(h), rtol=1e-12, atol=1e-12)
        except RuntimeError:
            return False  # it asks for more than numbers (parameters elsewhere): not one of ours


ExpertsInterface.register(NAME, kpt_experts_forward)
