"""A `MoELayer` in the place of a block of transformers."""

from difflib import ndiff
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._mixed import Mixed, mixed
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import MODE
from kpt_moe.expert_networks import ExpertNetwork, FeedForwardExpert
from kpt_moe.hf_modules import parameter_names
from kpt_moe.layers import MoEConfig, MoELayer
from kpt_moe.layers.shared import invariant_dense
from kpt_moe.routers import Router, TopKRouter
from kpt_moe.routing import Routing

from ._names import read_original_names, write_original_names
from .blocks import MoEBlock, sizes_of
from .experts import VariantFeedForwardExpert

#: Where a router keeps what transformers, and users, hook to see its decisions.
_TOLD = "told"
#: What our routers call what is added to scores where experts are chosen: a buffer, which stays on the device.
_CORRECTION = "correction_bias"


def _child(field: str, doc: str) -> Any:
    return property(lambda self: self._modules.get(getattr(self.plan, field)), doc=doc)


class KptMoEBlock(MoELayer):
    """A `MoELayer` that is called as the block of transformers whose place it takes, with the names of its parts.

    Router, experts and shared experts are the children that they are in the block, and its state dict has the block's
    names and shapes: what goes by names (checkpoints, adapters, hooks that offload) finds them where they were.

    Args:
        block: is left without its parameters, and kept for the way back.
        plan: what the block is.
    """

    def __init__(self, block: nn.Module, plan: MoEBlock) -> None:
        nn.Module.__init__(self)
        self.plan = plan
        self.origin = (block,)  # in a tuple, so that it is no submodule
        gate, theirs = block.get_submodule(plan.gate), block.get_submodule(plan.experts)
        self.config = config = _config(theirs, plan)
        router = _NamedRouter(config.hidden_size, num_experts=config.num_experts, **plan.router, device="meta")
        ours: dict[str, nn.Module] = {plan.gate: router, plan.experts: _experts(theirs, plan.activation, config)}
        for name, child in block.named_children():
            if name in (plan.gate, plan.experts, plan.shared, plan.shared_gate):
                # Not by add_module: it refuses the names of properties.
                self._modules[name] = ours.get(name, child)
        self.paths = _paths(theirs, plan)
        for here, there in self.paths.items():
            tensor = _get(block, there)
            if there == plan.correction:
                # What it is in the block: its dtype and shape, and whether it is trained, None of a buffer.
                trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
                self.correction = tensor.dtype, tensor.shape, trained
                tensor = tensor.detach().view(-1).float()
            _set(self, here, tensor)
        for module in (block, *gate.modules(), *theirs.modules()):
            for held in (module._parameters, module._buffers):
                held.update(dict.fromkeys(held))
        gate.__class__ = mixed(_Telling, type(gate))
        # Under its own name: transformers records logits where it finds a module of the gate's class.
        router.add_module(_TOLD, gate)
        self.register_state_dict_post_hook(write_original_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(read_original_names)  # type: ignore[no-untyped-call]
        self.train(block.training)
        self.made = repr(self)

    router: Router = _child("gate", "The router, under the name that the block gives its gate.")
    experts: ExpertNetwork = _child("experts", "The experts, under the name that the block gives them.")
    shared_experts: Any = _child("shared", "The block's own shared experts, as they were; None if it has none.")
    shared_gate: Any = _child("shared_gate", "What weighs the shared experts, the block's own; None if it has none.")

    def __setattr__(self, name: str, value: Any) -> None:
        plan: MoEBlock | None = vars(self).get("plan")
        if plan is not None and name in ("router", plan.gate):
            name, told = plan.gate, self._told
            # A wrapper of the router (an adapter's) has it already.
            if told not in value.modules():
                value.add_module(_TOLD, told)
        elif plan is not None and name == "experts":
            name = plan.experts
        super().__setattr__(name, value)

    @property
    def _told(self) -> nn.Module:
        return self.origin[0].get_submodule(self.plan.gate)

    def reset_parameters(self) -> None:
        """As of router and experts; linear modules of the shared experts as torch does."""
        self.router.reset_parameters()  # type: ignore[operator]
        self.experts.reset_parameters()  # type: ignore[operator]
        for part in (self.shared_experts, self.shared_gate):
            for module in () if part is None else part.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()

    def forward(self, x: Tensor, routing: Routing | None = None, **options: Any) -> Any:
        """As `MoELayer`; called with tokens alone, also what else the block returned."""
        if routing is not None or options:
            return super().forward(x, routing, **options)
        self._require_resident()
        routing = self.route(x)
        logits, weights, _ = self._told(routing.logits, routing.weights, routing.index)
        out = super().forward(x, routing)
        if self.plan.second is None:
            return out
        return out, logits if self.plan.second == "logits" else weights.to(x.dtype)

    def require_unchanged(self, path: str) -> None:
        """Raise `InputError` if what the block holds is something else than when it was made."""
        if repr(self) != self.made:
            lines = ndiff(self.made.splitlines(), repr(self).splitlines())
            changed = "\n".join(line for line in lines if line.startswith(("- ", "+ ")))
            raise InputError(
                f"to_transformers: {path or 'the module'} was changed since it was converted, to what "
                f"{type(self.origin[0]).__name__} may not compute:\n{changed}"
            )

    def restored(self) -> nn.Module:
        """The block of transformers, with the parameters of this layer."""
        (block,), plan = self.origin, self.plan
        gate = block.get_submodule(plan.gate)
        gate.__class__ = type(gate).__bases__[1]
        for here, there in self.paths.items():
            tensor = _get(self, here)
            if there == plan.correction:
                dtype, shape, trained = self.correction
                tensor = tensor.to(dtype).view(shape)
                tensor = tensor if trained is None else nn.Parameter(tensor, requires_grad=trained)
            _set(block, there, tensor)
        for name in (plan.shared, plan.shared_gate):
            if name is not None:
                block._modules[name] = self._modules[name]
        return block.train(self.training)

    def _require_resident(self) -> None:
        """Raise where accelerate will not find weights that it took away: it goes by names, and some are other here."""
        for ours, theirs in self.paths.items():
            owner, _, name = ours.rpartition(".")
            hook = getattr(self._modules[owner], "_hf_hook", None)
            if ours != theirs and name != _CORRECTION and getattr(hook, "weights_map", None) is not None:
                raise InputError(
                    f"{type(self.origin[0]).__name__}: accelerate can't offload {ours}, which checkpoints call "
                    f"{theirs}, and has let go of it: load the model anew, and use "
                    "kpt_moe.offload.offload_experts, or offload it unconverted with experts_implementation='kpt'"
                )

    def _shared(self, tokens: Tensor) -> Tensor:
        dense = self.plan.dense
        if MODE.on and dense is not None:
            *up, down = (self.shared_experts.get_submodule(name) for name in (*dense.up, dense.down))
            return invariant_dense(tokens, up, down, Activation(dense.activation), self.shared_gate)
        out: Tensor = self.shared_experts(tokens)
        return out if self.shared_gate is None else out * torch.sigmoid(self.shared_gate(tokens))


class _NamedRouter(TopKRouter):
    """Has the correction bias by checkpoints' name as well: torch.distributed.checkpoint walks along names."""

    @property
    def e_score_correction_bias(self) -> Tensor | None:
        return self.correction_bias

    def _get_name(self) -> str:
        return TopKRouter.__name__


class _Telling(Mixed):
    """Makes of a gate a module that returns what it is told, for those who hook gates to see it."""

    def forward(self, logits: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits, weights, index


def _held(module: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The dictionary that has a parameter or buffer of a module, and its name there."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    parameters: dict[str, Any] = owner._parameters
    return (parameters if name in parameters else owner._buffers), name


def _get(module: nn.Module, path: str) -> Any:
    held, name = _held(module, path)
    return held[name]


def _set(module: nn.Module, path: str, tensor: Any) -> None:
    held, name = _held(module, path)
    held[name] = tensor


def _config(module: Any, plan: MoEBlock) -> MoEConfig:
    num_experts, hidden, inner = sizes_of(module)
    return MoEConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        intermediate_size=inner,
        activation=plan.activation.name,
        bias=module.has_bias,
        **{name: plan.router[name] for name in ("top_k", "score", "renormalize")},
        num_shared_experts=int(plan.dense is not None),
        shared_intermediate_size=None if plan.dense is None else plan.dense.intermediate_size,
        shared_gate=plan.shared_gate is not None,
    )


def _experts(module: Any, activation: Activation, config: MoEConfig) -> ExpertNetwork:
    sizes: dict[str, Any] = {"num_experts": config.num_experts, "intermediate_size": config.intermediate_size}
    options = {**sizes, "bias": config.bias, "device": "meta"}
    if activation == Activation(activation.name) and not module.is_transposed:
        return FeedForwardExpert(config.hidden_size, activation=activation.name, **options)
    options["transposed"] = module.is_transposed
    return VariantFeedForwardExpert(config.hidden_size, activation=activation, **options)


def _paths(module: Any, plan: MoEBlock) -> dict[str, str]:
    """The path in the block of each tensor of the router and the experts, by its path here."""
    of_gate = {"weight": plan.weight, "bias": plan.bias, _CORRECTION: plan.correction}
    found = {f"{plan.gate}.{name}": path for name, path in of_gate.items() if path is not None}
    of_experts = {f"{plan.experts}.{ours}": theirs for ours, theirs in parameter_names(module).items()}
    return found | {ours: f"{plan.experts}.{theirs}" for ours, theirs in of_experts.items()}
