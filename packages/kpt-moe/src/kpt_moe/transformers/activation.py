"""Which of our activations an experts module of transformers applies."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import activations as hf_activations
from transformers.integrations.moe import _default_apply_gate

from kpt_moe.activations import Activation

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

#: What experts modules with a gating of their own were found to apply, and what they then were. Beside the modules, not
#: in them: a pickled model must not need KPT.
_asked: "WeakKeyDictionary[nn.Module, tuple[Any, Activation | None]]" = WeakKeyDictionary()

#: The parameters, and the module, that an experts module may have for us to know all that its gating depends on.
_PROJECTIONS = {
    f"{name}{suffix}"
    for name in ("gate_up_proj", "down_proj")
    for suffix in ("", "_bias", "_scale_inv", "_activation_scale")
}
_ACT_FN = "act_fn"
_NUMBERS = frozenset({int, float, bool, str})


def known_activation(module: Any) -> Activation | None:
    """Return which of our activations an experts module applies, or None if it is one of its own.

    A module that overrides `_apply_gate` is asked what it does to a few numbers, since its class says nothing; again
    only when one of its own numbers has changed. One that holds more tensors than the projections is not asked: what
    it does today may change with them.
    """
    if not torch.compiler.is_compiling():
        return _identify(module)
    # Dynamo knows nothing of what a constant depends on, but guards on what is compared where it looks.
    numbers, kind, found = _constant(module)
    for name, value in numbers:
        if getattr(module, name) != value:
            return None
    return found if type(getattr(module, _ACT_FN, None)) is kind else None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(module: Any) -> tuple[tuple[tuple[str, Any], ...], type, Activation | None]:
    """The numbers that a module has, the type of its activation, and which one it applies."""
    numbers = tuple((name, value) for name, value in vars(module).items() if type(value) in _NUMBERS)
    return numbers, type(getattr(module, _ACT_FN, None)), _identify(module)


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
