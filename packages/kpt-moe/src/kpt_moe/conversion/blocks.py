"""What a Mixture-of-Experts block of a transformers model computes, asked of the block itself."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._dtypes import DTYPES
from kpt_moe.activations import Activation
from kpt_moe.hf_modules import has_post_norm, is_transformers_experts, parameter_names
from kpt_moe.routers import TopKRouter
from kpt_moe.routing import Routing

from ._dense import DenseBlock, copy_without_hooks

#: What gates call the number of groups of experts, and of groups per token.
_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
_TOKENS = 24
#: How far below zero the logits of every other token lie: sigmoids are tiny there, and what is added to them shows.
_LOW = 12.0


@dataclass(frozen=True, slots=True)
class MoEBlock:
    """Where the parts of a block are, and which options make them ours; None is what it has not."""

    experts: str  # name of the experts module
    gate: str  # name of the module that decides
    weight: str  # path of the gate's matrix
    bias: str | None  # path of the gate's bias
    correction: str | None  # path of what is added to scores where experts are chosen
    router: dict[str, Any]  # options of `TopKRouter`, and `top_k`
    activation: Activation  # of the experts
    shared: str | None  # name of the shared experts
    shared_gate: str | None  # name of the linear module that weighs them
    dense: DenseBlock | None  # what the shared experts are
    second: str | None  # what the block returns beside tokens: `weights` or `logits`

    @classmethod
    def of(cls, block: nn.Module) -> "MoEBlock":
        """Read a block. Its class does not say what it computes: a twin with random numbers and stand-ins is run.

        Raises `InputError` if it computes something else than a `MoELayer` can, with the reason.
        """
        owner = type(block).__name__
        children = {name: child for name, child in block.named_children() if type(child) is not nn.Identity}
        names = [name for name, child in children.items() if is_transformers_experts(child)]
        gates = [name for name, child in children.items() if name.startswith("shared") and _weighs(child)]
        denses = [name for name in children if name.startswith("shared") and name not in gates]
        deciding = [name for name in children if name not in (*names, *gates, *denses)]
        if len(names) != 1 or len(deciding) != 1 or len(gates) > 1 or len(denses) > 1 or len(gates) > len(denses):
            raise InputError(
                f"{owner}: must consist of a router, experts and perhaps shared experts; it holds {sorted(children)}"
            )
        for name in ("", *names, *deciding):
            if "forward" in vars(block.get_submodule(name)):
                what = name or "the block"
                raise InputError(f"{owner}: the forward of {what} was replaced (by hooks of accelerate?)")
        (experts,), (gate,), shared, shared_gate = names, deciding, next(iter(denses), None), next(iter(gates), None)
        activation = _activation(owner, children[experts])
        parts = _parts(owner, block, gate, children[experts])
        dense = None if shared is None else DenseBlock.of(children[shared])
        router, second = _Twin(block, experts, gate, shared, shared_gate).ask(*parts)
        return cls(experts, gate, *parts, router, activation, shared, shared_gate, dense, second)


def moe_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of which an experts module of transformers is a child, by its path."""
    for path, module in model.named_modules(remove_duplicate=False):
        if any(is_transformers_experts(child) for child in module.children()):
            yield path, module


def replace_modules(
    model: nn.Module, paths: Iterable[str], make: Callable[[str, Any], nn.Module], *, inplace: bool
) -> nn.Module:
    """Put what is made of the modules at `paths` in their place; of a module at several paths one is made.

    Returns:
        `model`, or a deep copy of it unless `inplace`; what takes its place if its own path `""` is among `paths`.
    """
    if not inplace:
        model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}
    for path, module in [(path, model.get_submodule(path)) for path in paths]:
        if module not in made:
            made[module] = make(path, module)
        if not path:
            return made[module]
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = made[module]
    return model


def sizes_of(experts: Any) -> tuple[int, int, int]:
    """Number of experts, hidden size and inner width of an experts module."""
    num_experts, first, second = experts.down_proj.shape
    hidden, inner = (second, first) if experts.is_transposed else (first, second)
    return num_experts, hidden, inner


def _weighs(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.out_features == 1 and module.bias is None


def _activation(owner: str, module: Any) -> Activation:
    from kpt_moe.transformers import known_activation

    known = set(parameter_names(module).values())
    held = dict([*module.named_parameters(), *module.named_buffers()])
    what = None
    if has_post_norm(module) or held.keys() != known:
        what = f"the experts must hold {sorted(known)} alone; they hold {sorted(held)}"
    elif any(tensor.dtype not in DTYPES for tensor in held.values()):
        what = f"the experts are of {sorted({str(tensor.dtype) for tensor in held.values()})}"
    elif module._is_expert_parallel:
        what = "the experts are spread over ranks by transformers: load the model without its expert parallelism"
    activation = known_activation(module) if what is None else None
    if activation is None:
        raise InputError(f"{owner}: {what or 'the activation of the experts is none of ours'}")
    return activation


def _parts(owner: str, block: nn.Module, gate: str, experts: Any) -> tuple[str, str | None, str | None]:
    """The paths of the gate's matrix, of its bias and of the correction bias."""
    num_experts, hidden, _ = sizes_of(experts)
    held = {f"{gate}.{name}": tensor for name, tensor in _tensors(block.get_submodule(gate))}
    held |= dict(_tensors(block, recurse=False))
    matrices = [path for path, tensor in held.items() if tensor.shape == (num_experts, hidden)]
    weight = matrices[0] if len(matrices) == 1 else ""
    bias = weight.removesuffix("weight") + "bias"
    rest = [path for path in held if path not in (weight, bias)]
    if not weight or len(rest) > 1 or any(held[path].numel() != num_experts for path in held if path != weight):
        shapes = {path: list(tensor.shape) for path, tensor in held.items()}
        raise InputError(
            f"{owner}: TopKRouter has one matrix [{num_experts}, {hidden}], a bias and a correction bias; its router "
            f"has {shapes}"
        )
    return weight, bias if bias in held else None, rest[0] if rest else None


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]


class _Experts(nn.Module):
    """Stands in for experts: expert `e` multiplies by the `e`-th factor. Keeps what it is told."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors
        self.num_experts = len(factors)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.index, self.weights = top_k_index, top_k_weights
        return hidden_states * (top_k_weights * self.factors[top_k_index]).sum(-1, keepdim=True)


class _Twin:
    """A block on the CPU with random numbers in its router, and stand-ins for its experts."""

    def __init__(self, block: nn.Module, experts: str, gate: str, shared: str | None, shared_gate: str | None) -> None:
        self.owner = type(block).__name__
        num_experts, self.hidden, _ = sizes_of(block.get_submodule(experts))
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.direction = self.hidden**-0.5 * self._random(self.hidden)
        self.gate = copy_without_hooks(block.get_submodule(gate))
        for module in self.gate.modules():
            self._randomise(module)
        self.gate.register_forward_hook(self._keep)
        self.experts = _Experts(1 + self._random(num_experts).sigmoid())
        self.shared = None if shared is None else nn.Tanh()
        self.shared_gate = None if shared_gate is None else nn.Linear(self.hidden, 1, bias=False, device="meta")
        if self.shared_gate is not None:
            self._randomise(self.shared_gate)
        self.block: Any = copy.copy(block)
        rest = {name: nn.Identity() for name, child in block.named_children() if type(child) is nn.Identity}
        ours = {gate: self.gate, experts: self.experts, shared: self.shared, shared_gate: self.shared_gate}
        self.block._modules = {**block._modules, **rest, **{name: part for name, part in ours.items() if name}}
        self.block._parameters, self.block._buffers = dict(block._parameters), dict(block._buffers)
        self._randomise(self.block)

    def ask(self, weight: str, bias: str | None, correction: str | None) -> tuple[dict[str, Any], str | None]:
        """The router's options, and what the block returns beside tokens."""
        tensors = dict(_tensors(self.block))
        x = self._random(2, _TOKENS, self.hidden)
        x[1] -= _LOW * self.direction / self.direction.square().sum()
        tokens = x.flatten(0, 1)
        router: dict[str, Any] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for training in (False, True):
                try:
                    out = self.block.train(training).forward(x.clone())
                    told = self.experts.index, self.experts.weights.float()
                except Exception as error:
                    raise InputError(f"{self.owner}: does not go by tokens alone: {error}") from error
                if not router:
                    held = [None if path is None else tensors[path] for path in (bias, correction)]
                    router, routing = self._router(tokens, told, tensors[weight], *held)
                    decided = _dense(routing.index, routing.weights, routing.num_experts)
                elif not _same(_dense(*told, routing.num_experts), decided):
                    raise InputError(f"{self.owner}: routes otherwise in training (jitter, or sampled experts)")
                second = self._second(out, x, told, routing)
        return router, second

    def _router(
        self,
        tokens: Tensor,
        told: tuple[Tensor, Tensor],
        weight: Tensor,
        bias: Tensor | None,
        correction: Tensor | None,
    ) -> tuple[dict[str, Any], Routing]:
        """The options with which `TopKRouter` decides what the experts were told, and its decision."""
        top_k, num_experts = told[0].shape[-1], len(weight)
        numbers = {**vars(self.block), **vars(self.gate)}
        scales = [1.0, *(float(number) for number in numbers.values() if type(number) in (int, float))]
        groups = [(1, 1), *((numbers[n], numbers[k]) for n, k in _GROUPS if numbers.get(n) and numbers.get(k))]
        want = _dense(*told, num_experts)
        for (num_groups, top_groups), score, renormalize in product(groups, ("softmax", "sigmoid"), (False, True)):
            options = {
                "top_k": top_k,
                "score": score,
                "renormalize": renormalize,
                "num_groups": num_groups,
                "top_groups": top_groups,
                "bias": bias is not None,
                "correction_bias": correction is not None,
            }
            router = TopKRouter(self.hidden, num_experts=num_experts, **options, device="cpu", dtype=torch.float32)
            own = router.weight, router.bias, router.correction_bias
            for parameter, value in zip(own, (weight, bias, correction), strict=True):
                if parameter is not None and value is not None:
                    parameter.copy_(value.view_as(parameter))
            routing = router(tokens)
            have = _dense(routing.index, routing.weights, num_experts)
            scale = next((scale for scale in scales if _same(have * scale, want)), None)
            if scale is not None:
                return {**options, "scale": scale}, replace(routing, weights=routing.weights * scale)
        raise InputError(f"{self.owner}: its router weighs experts as no TopKRouter does")

    def _second(self, out: Any, x: Tensor, told: tuple[Tensor, Tensor], routing: Routing) -> str | None:
        """What the block returns beside tokens, its other results found to be those of a `MoELayer`."""
        tokens = x.flatten(0, 1)
        want = self.experts(tokens, *told)
        if self.shared is not None:
            shared = self.shared(tokens)
            want = want + (shared if self.shared_gate is None else shared * self.shared_gate(tokens).sigmoid())
        main, *others = out if isinstance(out, tuple) else (out,)
        if not isinstance(main, Tensor) or main.shape != x.shape or not _same(main.flatten(0, 1), want):
            raise InputError(f"{self.owner}: its result is not the sum of its experts and shared experts")
        logits = self.decided[0] if isinstance(self.decided, tuple) else None
        if not isinstance(logits, Tensor) or not _same(logits, routing.logits):
            raise InputError(f"{self.owner}: its router does not give its logits first")
        if not others:
            return None
        for name, tensor in (("weights", told[1]), ("logits", logits)):
            if len(others) == 1 and _same(others[0], tensor):
                return name
        raise InputError(f"{self.owner}: what it returns beside tokens is neither weights nor logits")

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cpu", generator=self.generator)

    def _randomise(self, module: nn.Module) -> None:
        tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, tensor in held.items():
                if tensor is not None:
                    random = self._random(*tensor.shape)
                    random = 2 * self.hidden**-0.5 * random + self.direction if name == "weight" else 0.1 * random
                    held[name] = nn.Parameter(random) if isinstance(tensor, nn.Parameter) else random

    def _keep(self, gate: nn.Module, args: Any, output: Any) -> None:
        self.decided = output


def _dense(index: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """The weight of each expert, `[tokens, num_experts]`."""
    dense = torch.zeros(len(index), num_experts, device=weights.device)
    return dense.scatter_add(1, index.long(), weights.float())


def _same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)
