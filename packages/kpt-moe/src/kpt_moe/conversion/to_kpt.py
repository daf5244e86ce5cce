"""Put KPT's layers in the place of a transformers model's Mixture-of-Experts blocks."""

import copy
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.activations import Activation
from kpt_moe.expert_networks import ExpertNetwork, FeedForwardExpert
from kpt_moe.layers import MoEConfig, MoELayer
from kpt_moe.routers import TopKRouter

from ._replace import replace_modules
from .blocks import MoEBlock, moe_blocks, sizes_of
from .experts import VariantFeedForwardExpert


def to_kpt_layers(model: nn.Module, *, inplace: bool = False, strict: bool = False) -> nn.Module:
    """Replace every Mixture-of-Experts block of a transformers model by one that holds a `MoELayer`.

    What blocks compute is asked of themselves, whatever their family: a linear router with softmax or sigmoid scores,
    perhaps groups, a correction bias and a scale; fused experts with an activation of ours; shared experts, perhaps
    weighed. Anything else is refused: PhiMoE's sparsemixer, hash routing, latent experts, jitter that experts see.

    Parameters are the same objects as before, so that optimizers keep them, but for gate and up projections of shared
    experts, which become one. Routing is decided in float32: in a bfloat16 model, tokens whose experts are nearly
    tied may go elsewhere than before. `output_router_logits` works as before; its logits are float32. Hooks of the
    blocks rest until `to_transformers`, which is also the way to save the model for others.

    Args:
        model: of transformers 5, its experts in fused modules; or such a block alone.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.
        strict: raise for a block that can't be replaced. Otherwise it stays, with a warning that says why.

    Returns:
        The model with `KptMoEBlock` in the place of blocks.

    Raises:
        InputError: there is no such block; or, if `strict`, one that can't be replaced. `model` is then unchanged.

    Example:
        >>> model = to_kpt_layers(AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924"), inplace=True)
        >>> model = to_transformers(model, inplace=True)
    """
    plans: dict[str, MoEBlock] = {}
    refused: dict[str, str] = {}
    for path, block in moe_blocks(model):
        try:
            plans[path] = MoEBlock.of(block)
        except InputError as error:
            refused[path] = str(error)
    if not plans and not refused:
        raise InputError(f"to_kpt_layers: {type(model).__name__} has no Mixture-of-Experts block of transformers")
    for path, reason in refused.items():
        what = f"to_kpt_layers: {path or 'the module'} has no counterpart: {reason}"
        if strict:
            raise InputError(what)
        warnings.warn(f"{what}. It stays as it is.", stacklevel=2)
    if not inplace:
        model = copy.deepcopy(model)
    return replace_modules(model, plans, lambda path, block: KptMoEBlock(block, plans[path]))


class KptMoEBlock(nn.Module):
    """A `MoELayer` that is called as the block of transformers whose place it takes.

    Args:
        block: is left without its parameters, and kept for the way back.
        plan: what the block is.

    Attributes:
        layer: the `MoELayer`.
    """

    def __init__(self, block: nn.Module, plan: MoEBlock) -> None:
        super().__init__()
        self.plan = plan
        self.layer = _layer(block, plan)
        self.made = repr(self.layer)
        # In a tuple, so that they are no submodules.
        self.origin = (block,)
        self.correction_like = (_like(block, plan.correction),)
        for module in block.modules():
            for held in (module._parameters, module._buffers):
                held.update(dict.fromkeys(held))
        gate: Any = block.get_submodule(plan.gate)
        kind: Any = type(gate)
        gate.__class__ = _telling(kind)
        # By its own name: transformers records logits where it finds a module of the gate's class.
        self.add_module(plan.gate, gate)
        self.train(block.training)

    def forward(self, hidden_states: Tensor) -> Any:
        """Tokens `[..., hidden_size]` to the same, and what else the block returned."""
        routing = self.layer.route(hidden_states)
        logits, weights, _ = getattr(self, self.plan.gate)(routing.logits, routing.weights, routing.index)
        out = self.layer(hidden_states, routing)
        if self.plan.second is None:
            return out
        return out, logits if self.plan.second == "logits" else weights.to(hidden_states.dtype)


class _Telling:
    """Makes of a gate a module that returns what it is told, for those who hook gates to see it."""

    def forward(self, logits: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits, weights, index

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class is made here: pickle can't find it by name.
        return _blank, (type(self).__mro__[2],), vars(self)


@cache
def _telling(kind: Any) -> Any:
    return type(kind.__name__, (_Telling, kind), {"__doc__": kind.__doc__})


def _blank(kind: Any) -> nn.Module:
    made: nn.Module = object.__new__(_telling(kind))
    return made


def _like(block: nn.Module, path: str | None) -> Tensor | None:
    """A tensor of a block without its numbers, as parameter or buffer."""
    if path is None:
        return None
    tensor = _tensor(block, path)
    like = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(like, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def _tensor(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), name)
    return tensor


def _layer(block: nn.Module, plan: MoEBlock) -> MoELayer:
    """The layer, with the block's own parameters."""
    module: Any = block.get_submodule(plan.experts)
    num_experts, hidden, inner = sizes_of(module)
    config = MoEConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        top_k=plan.router["top_k"],
        intermediate_size=inner,
        activation=plan.activation.name,
        bias=module.has_bias,
        score=plan.router["score"],
        renormalize=plan.router["renormalize"],
        num_shared_experts=int(plan.dense is not None),
        shared_intermediate_size=None if plan.dense is None else plan.dense.intermediate_size,
        shared_gate=plan.shared_gate is not None,
    )
    router = TopKRouter(hidden, num_experts, **plan.router, device="meta")
    router.weight = block.get_parameter(plan.weight)
    if plan.bias is not None:
        router.bias = block.get_parameter(plan.bias)
    if plan.correction is not None:
        router.correction_bias = _tensor(block, plan.correction).detach().view(-1).float()
    layer = MoELayer(config, router=router, experts=_experts(module, plan.activation), device="meta")
    if plan.dense is not None and plan.shared is not None:
        gate: Any = None if plan.shared_gate is None else block.get_submodule(plan.shared_gate)
        layer.shared_experts = plan.dense.shared(block.get_submodule(plan.shared), gate)
    return layer


def _experts(module: Any, activation: Activation) -> ExpertNetwork:
    num_experts, hidden, inner = sizes_of(module)
    place: dict[str, Any] = {"bias": module.has_bias, "device": "meta"}
    network: FeedForwardExpert | VariantFeedForwardExpert
    if activation == Activation(activation.name) and not module.is_transposed:
        network = FeedForwardExpert(num_experts, hidden, inner, activation=activation.name, **place)
    else:
        options = {"activation": activation, "transposed": module.is_transposed}
        network = VariantFeedForwardExpert(num_experts, hidden, inner, **options, **place)
    for ours, theirs in names_of(module).items():
        setattr(network, ours, module.get_parameter(theirs))
    return network


def names_of(module: Any) -> dict[str, str]:
    """What the parameters of an experts module are called, by their names in `FeedForwardExpert`."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up_proj": up, "down_proj": "down_proj"}
    return names | ({"gate_up_proj_bias": f"{up}_bias", "down_proj_bias": "down_proj_bias"} if module.has_bias else {})
