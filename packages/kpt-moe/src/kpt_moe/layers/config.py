"""The configuration of Mixture-of-Experts layers."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_known, require_size
from kpt_moe.activations import Activation
from kpt_moe.expert_networks import EXPERTS, ExpertNetwork
from kpt_moe.routers import ROUTERS, Router

_Made = TypeVar("_Made")

#: What was not written down: the layer, or the class of its router, has its own default. `None` is a choice. A string,
#: so that a configuration can be written to JSON and read again.
UNSET: Any = "unset"

#: What the router takes, by its own names.
_OF_ROUTER = {
    "top_k": "top_k",
    "score": "score_function",
    "renormalize": "renormalize",
    "capacity_factor": "capacity_factor",
    "eval_capacity_factor": "eval_capacity_factor",
}
#: What is chosen where neither the configuration nor the layer does.
_USUAL = {"top_k": 2, "activation": "swiglu", "router": "top_k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and choices of a Mixture-of-Experts layer.

    What would have no effect is refused: the width of experts that have none, a choice that a given router or network
    doesn't follow. `MoELayer.config` has the layer's defaults in the place of `UNSET`.

    Attributes:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token; of the expert-choice router, on average. Unset, 2 or what the layer fixes.
        intermediate_size: inner width of an expert; None gives four times `hidden_size`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
            Unset, `swiglu` or the layer's own.
        bias: give both projections of an expert, and of the shared ones, a bias.
        router: kind of router, a name of `kpt_moe.routers.ROUTERS`. Unset, `top_k` or what the layer fixes.
        score: how the router scores experts, see `TopKRouter`.
        renormalize: make the weights of a token's experts sum to one; None does so unless `top_k` is 1, since all
            weights would be one and the router learn from balancing losses alone.
        capacity_factor: an expert takes at most this many times the average number of tokens; None is no limit. Unset,
            it is the layer's own, or that of the router's class: no limit but for `switch` and `expert_choice`.
        eval_capacity_factor: the same outside of training; None is `capacity_factor`, and so it is unset beside a
            `capacity_factor`.
        router_options: further arguments of the router's class.
        expert: kind of experts, a name of `kpt_moe.expert_networks.EXPERTS`.
        expert_options: further arguments of the experts' class.
        num_shared_experts: experts that every token goes through, beside its own (DeepSeekMoE, arXiv:2401.06066).
        shared_intermediate_size: inner width of all shared experts together; None is `num_shared_experts` times the
            width of an expert.
        shared_gate: weigh the shared experts by the sigmoid of a linear function of the token (Qwen2-MoE).

    Raises:
        InputError: a size is not positive, `top_k` exceeds `num_experts`, or a choice has no effect.
        UnknownNameError: no such activation, router or kind of experts.
    """

    hidden_size: int
    num_experts: int
    top_k: int = UNSET
    intermediate_size: int | None = None
    activation: str = UNSET
    bias: bool = False
    router: str = UNSET
    score: str = UNSET
    renormalize: bool | None = None
    capacity_factor: float | None = UNSET
    eval_capacity_factor: float | None = UNSET
    router_options: Mapping[str, Any] = field(default_factory=dict)
    expert: str = "feed_forward"
    expert_options: Mapping[str, Any] = field(default_factory=dict)
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_experts", "top_k", "intermediate_size", "shared_intermediate_size"):
            if self._is_set(name):
                most = (self.num_experts, "num_experts") if name == "top_k" else ()
                require_size("MoEConfig", name, getattr(self, name), *most)
        require_bools("MoEConfig", bias=self.bias, shared_gate=self.shared_gate)
        require_size("MoEConfig", "num_shared_experts", self.num_shared_experts, least=0)
        if not self.num_shared_experts and (self.shared_gate or self.shared_intermediate_size is not None):
            raise InputError(
                "MoEConfig: shared_gate and shared_intermediate_size are of shared experts, but num_shared_experts is 0"
            )
        if self.activation != UNSET:
            Activation(self.activation)
        if self.router != UNSET:
            require_known("router", self.router, ROUTERS)
        require_known("kind of experts", self.expert, EXPERTS)
        for name in ("intermediate_size", "activation"):
            shared = self.num_shared_experts > 0 and (name == "activation" or self.shared_intermediate_size is None)
            if self._is_set(name) and not EXPERTS[self.expert].has_width and not shared:
                wide = ", ".join(kind for kind, network in EXPERTS.items() if network.has_width)
                raise self._unused(name, f"experts of kind {self.expert!r} have no inner width, as {wide} have")
        for name in _OF_ROUTER:
            if self._is_set(name) and name in self.router_options:
                raise self._unused(name, f"router_options has it too ({self.router_options[name]!r})")

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size

    def filled(self, layer: Any, router: Router | None, experts: ExpertNetwork | None) -> "MoEConfig":
        """The configuration with what a class of layers fixes, and its defaults for what is unset.

        Raises `InputError` if it asks for something else than what is fixed, or than a given router or network has.
        """
        for name, value in layer.fixed.items():
            if self._is_set(name) and getattr(self, name) != value:
                raise InputError(f"{layer.__name__}: {name} is always {value!r}; got {getattr(self, name)!r}")
        if router is not None:
            kind = layer.fixed.get("router", self.router)
            if kind != UNSET and not isinstance(router, ROUTERS[kind]):
                raise self._unused("router", f"the router given is a {type(router).__name__}", kind)
            self._require_effect("router", router, self._said(_OF_ROUTER, self.router_options))
        if experts is not None:
            if self.expert != "feed_forward" and not isinstance(experts, EXPERTS[self.expert]):
                raise self._unused("expert", f"the experts given are a {type(experts).__name__}")
            named = [*experts.named_parameters(), *experts.named_buffers()]
            if self.bias and not self.num_shared_experts and not any("bias" in name for name, _ in named):
                raise self._unused("bias", f"the experts given, a {type(experts).__name__}, have none")
            names = () if self.num_shared_experts else ("intermediate_size", "activation")
            self._require_effect("experts", experts, self._said(names, self.expert_options))
        chosen: dict[str, Any] = {**_USUAL, **layer.defaults, **layer.fixed}
        if not EXPERTS[self.expert].has_width and not self.num_shared_experts:
            del chosen["activation"]
        if router is not None:
            chosen = {"top_k": router.top_k, "activation": chosen.get("activation", UNSET)}
        said = self.router_options.keys() & _OF_ROUTER
        chosen = {name: value for name, value in chosen.items() if not (self._is_set(name) or name in said)}
        if "router_options" in chosen:
            chosen["router_options"] = {**chosen["router_options"], **self.router_options}
        return replace(self, **chosen)

    def make_router(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Router:
        """The router of a configuration that is filled in."""
        options = self._said(_OF_ROUTER, self.router_options)
        if self._is_set("capacity_factor"):
            options.setdefault("eval_capacity_factor", None)
        return self._made(ROUTERS[self.router], "router_options", options, device, dtype)

    def make_experts(self, device: torch.device | str | None, dtype: torch.dtype | None) -> ExpertNetwork:
        """The experts of a configuration that is filled in."""
        kind = EXPERTS[self.expert]
        options: dict[str, Any] = {"bias": self.bias}
        if kind.has_width:
            options |= {"intermediate_size": self.expert_width, "activation": self.activation}
        return self._made(kind, "expert_options", {**options, **self.expert_options}, device, dtype)

    def _made(self, kind: Callable[..., _Made], source: str, options: dict[str, Any], device: Any, dtype: Any) -> _Made:
        sizes: dict[str, Any] = {"hidden_size": self.hidden_size, "num_experts": self.num_experts}
        name, given = getattr(kind, "__name__", str(kind)), {**sizes, **options, "device": device, "dtype": dtype}
        asked = inspect.signature(kind).parameters.values()
        missing = [each.name for each in asked if each.default is each.empty and each.kind is each.KEYWORD_ONLY]
        missing = [each for each in missing if each not in given]
        if missing:
            example = ", ".join(f'"{each}": ...' for each in missing)
            raise InputError(f"MoEConfig: {name} needs {', '.join(missing)}: give {source}={{{example}}}")
        try:
            return kind(**given)
        except TypeError as error:
            raise InputError(f"MoEConfig: {name} does not take these {source}: {error}") from error

    def _is_set(self, name: str) -> bool:
        value = getattr(self, name)
        optional = name in ("intermediate_size", "shared_intermediate_size", "renormalize")
        return name != "router_options" and value != UNSET and not (optional and value is None)

    def _said(self, names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in names if self._is_set(name)}, **options}

    def _require_effect(self, part: str, given: Router | ExpertNetwork, said: Mapping[str, Any]) -> None:
        for name, value in said.items():
            own = getattr(given, _OF_ROUTER.get(name, name), UNSET)
            if getattr(own, "name", own) != value:
                told = "none" if own is UNSET else repr(own)
                raise self._unused(name, f"the {part} given, a {type(given).__name__}, has {told}", value)

    def _unused(self, name: str, why: str, value: Any = UNSET) -> InputError:
        value = getattr(self, name) if value == UNSET else value
        return InputError(f"MoEConfig: {name}={value!r} has no effect: {why}; leave it out")
