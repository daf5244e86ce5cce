"""Make dense feed-forward blocks sparse, with experts that begin as copies of them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError
from kpt_moe._checks import require_size
from kpt_moe.expert_networks import FeedForwardExpert
from kpt_moe.layers import MoEConfig, MoELayer
from kpt_moe.routers import TopKRouter

from ._dense import DenseBlock, projections
from ._replace import replace_modules
from .blocks import moe_blocks
from .to_kpt import KptMoEBlock

#: Which blocks: all, the second, fourth, ... (Sparse Upcycling), or these, by their number or path.
Layers = Literal["all", "every-other"] | Sequence[int | str]

#: Fields of `MoEConfig` that follow from the dense block and the other arguments.
_SET = frozenset(
    {
        "hidden_size",
        "num_experts",
        "top_k",
        "intermediate_size",
        "activation",
        "bias",
        "router",
        "expert",
        "num_shared_experts",
        "shared_intermediate_size",
        "shared_gate",
    }
)


def upcycle(
    model: nn.Module,
    num_experts: int,
    top_k: int,
    *,
    layers: Layers = "all",
    granularity: int = 1,
    shared: bool = False,
    noise: float = 0.0,
    reinit_fraction: float = 0.0,
    router_std: float = 0.02,
    generator: torch.Generator | None = None,
    inplace: bool = False,
    **config: Any,
) -> nn.Module:
    """Replace dense feed-forward blocks by `MoELayer`s whose experts are copies of them (arXiv:2212.05055).

    Routing weights sum to one, so that the model computes what it did before, up to rounding, whatever the router
    decides; noise and re-initialisation change that. Experts part in training, since they see different tokens.
    A layer has `num_experts * granularity` experts with the parameters of `num_experts` blocks in all, and a router of
    `num_experts * granularity * hidden_size`.

    Args:
        model: contains blocks with linear modules `gate_proj`, `up_proj`, `down_proj` (Llama, Qwen), `gate_up_proj`,
            `down_proj` (Phi-3), `fc1`, `fc2`, and the like; or such a block.
        num_experts: copies of a block.
        top_k: copies that each token uses.
        layers: `all` blocks, `every-other` beginning with the second, or those of the given numbers or paths.
        granularity: cut each copy into so many experts of a part of the inner width each (arXiv:2410.07524). The parts
            of a copy begin with the same row of the router, so that a token uses whole copies: `top_k * granularity`
            of the parts, weights scaled by `granularity`.
        shared: keep the block as a shared expert too; it and the routed ones count half each.
        noise: add normal noise to the experts' matrices, of this many times their deviation.
        reinit_fraction: draw so large a part of each expert's inner units anew, at random for each expert, with mean
            and deviation of what they replace (Drop-Upcycling, arXiv:2502.19261).
        router_std: deviation of the router's weights.
        generator: of all random numbers, on the device of the weights.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.
        config: further fields of `MoEConfig`: `capacity_factor`, `score`, `router_options`. With `renormalize=False`
            outputs are not those of before.

    Returns:
        The model; the layer itself if `model` is a block.

    Raises:
        InputError: there is no such block, or one computes something else than our experts can; a number is out of
            range; a field of `config` follows from something else. `model` is then unchanged.
        UnknownNameError: a path or field that there is not.

    Example:
        >>> model = upcycle(LlamaForCausalLM.from_pretrained(name), num_experts=8, top_k=2, layers="every-other")
    """
    for name in config:
        if name not in {field.name for field in fields(MoEConfig)} - _SET:
            if name in _SET:
                raise InputError(f"upcycle: {name} follows from the dense block and the other arguments: leave it out")
            raise UnknownNameError("field of MoEConfig", name, {field.name for field in fields(MoEConfig)} - _SET)
    require_size("upcycle", "num_experts", num_experts)
    require_size("upcycle", "top_k", top_k, num_experts, "num_experts")
    require_size("upcycle", "granularity", granularity)
    for name, value, most in (
        ("noise", noise, float("inf")),
        ("reinit_fraction", reinit_fraction, 1.0),
        ("router_std", router_std, float("inf")),
    ):
        if not 0 <= value <= most or value == float("inf"):
            raise InputError(f"upcycle: {name} must be at least 0{' and at most 1' if most == 1 else ''}; got {value}")
    how = _Upcycling(num_experts, top_k, granularity, shared, noise, reinit_fraction, router_std, generator, config)
    plans = {path: how.plan(model.get_submodule(path)) for path in _chosen(_dense_blocks(model), layers, model)}
    if not inplace:
        model = copy.deepcopy(model)
    return replace_modules(model, plans, lambda path, block: how.layer(block, *plans[path]))


@dataclass(frozen=True, slots=True)
class _Upcycling:
    """The arguments of `upcycle`."""

    num_experts: int
    top_k: int
    granularity: int
    shared: bool
    noise: float
    reinit_fraction: float
    router_std: float
    generator: torch.Generator | None
    config: dict[str, Any]

    def plan(self, block: nn.Module) -> tuple[DenseBlock, MoEConfig]:
        """What a block is, and the configuration of its layer."""
        dense, parts = DenseBlock.of(block), self.granularity
        if dense.intermediate_size % parts:
            raise InputError(
                f"upcycle: granularity must divide the inner width {dense.intermediate_size} of "
                f"{type(block).__name__}; got {parts}"
            )
        scale = parts * (0.5 if self.shared else 1.0)
        options = {"scale": scale, **self.config.get("router_options", {})}
        return dense, MoEConfig(
            hidden_size=dense.hidden_size,
            num_experts=self.num_experts * parts,
            top_k=self.top_k * parts,
            intermediate_size=dense.intermediate_size // parts,
            activation=dense.activation,
            bias=dense.bias,
            num_shared_experts=int(self.shared),
            shared_intermediate_size=dense.intermediate_size if self.shared else None,
            **{**self.config, "router_options": options},
        )

    @torch.no_grad()
    def layer(self, block: nn.Module, dense: DenseBlock, config: MoEConfig) -> MoELayer:
        """The layer in the place of a block."""
        up, down, up_bias, down_bias = dense.tensors(block)
        layer = MoELayer(config, device="meta", dtype=down.dtype).to_empty(device=down.device)
        router, experts = layer.router, layer.experts
        assert isinstance(router, TopKRouter)
        assert isinstance(experts, FeedForwardExpert)
        router.reset_parameters()
        rows = torch.empty_like(router.weight[:: self.granularity])
        rows.normal_(std=self.router_std, generator=self.generator)
        router.weight.copy_(rows.repeat_interleave(self.granularity, 0))
        copies, parts = self.num_experts, self.granularity
        experts.gate_up_proj.copy_(_rows(up, dense, parts).repeat(copies, 1, 1))
        experts.down_proj.copy_(down.unflatten(1, (parts, -1)).movedim(1, 0).repeat(copies, 1, 1))
        if up_bias is not None and down_bias is not None:
            assert experts.gate_up_proj_bias is not None
            assert experts.down_proj_bias is not None
            experts.gate_up_proj_bias.copy_(_rows(up_bias, dense, parts).repeat(copies, 1))
            experts.down_proj_bias.copy_(down_bias / parts)
        self._reinitialise(experts)
        for weight in (experts.gate_up_proj, experts.down_proj) if self.noise else ():
            noise = torch.empty_like(weight).normal_(generator=self.generator)
            weight.add_(noise * (self.noise * weight.std(dim=(1, 2), keepdim=True)))
        if layer.shared_experts is not None:
            state = {"gate_up_proj.weight": up, "down_proj.weight": down / 2}
            if up_bias is not None and down_bias is not None:
                state |= {"gate_up_proj.bias": up_bias, "down_proj.bias": down_bias / 2}
            layer.shared_experts.load_state_dict(state)
        return layer.train(block.training)

    def _reinitialise(self, experts: FeedForwardExpert) -> None:
        """Draw some inner units of each expert anew."""
        inner = experts.intermediate_size
        count = int(self.reinit_fraction * inner)
        for expert in range(experts.num_experts if count else 0):
            device = experts.down_proj.device
            units = torch.randperm(inner, device=device, generator=self.generator)[:count]
            matrices = [*experts.gate_up_proj[expert].split(inner), experts.down_proj[expert].mT]
            for matrix in matrices:
                old = matrix[units].float()
                new = torch.empty_like(old).normal_(generator=self.generator)
                matrix[units] = (new * old.std(correction=0) + old.mean()).to(matrix.dtype)


def _rows(tensor: Tensor, dense: DenseBlock, parts: int) -> Tensor:
    """Gate and up `[width, ...]` cut into those of `parts` experts, `[parts, width / parts, ...]`."""
    rows: Tensor = tensor.unflatten(0, (-1, parts, dense.intermediate_size // parts)).transpose(0, 1).flatten(1, 2)
    return rows


def _dense_blocks(model: nn.Module) -> list[str]:
    """The paths of dense feed-forward blocks, those that are part of a Mixture-of-Experts block left out."""
    sparse = [path for path, _ in moe_blocks(model)]
    sparse += [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, MoELayer | KptMoEBlock)
    ]
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if projections(module) is not None and not any(f"{path}.".startswith(f"{outer}.") for outer in sparse)
    ]


def _chosen(paths: list[str], layers: Layers, model: nn.Module) -> list[str]:
    if not paths:
        raise InputError(f"upcycle: {type(model).__name__} has no dense feed-forward block of known projections")
    if layers == "all":
        return paths
    if layers == "every-other":
        chosen = paths[1::2]
    elif isinstance(layers, str):
        raise UnknownNameError("choice of layers", layers, ("all", "every-other"))
    else:
        chosen = []
        for layer in layers:
            if isinstance(layer, str) and layer not in paths:
                raise UnknownNameError("path of a dense feed-forward block", layer, paths)
            if not isinstance(layer, str) and not 0 <= layer < len(paths):
                raise InputError(f"upcycle: layers must be from 0 to {len(paths) - 1}; got {layer}")
            chosen.append(layer if isinstance(layer, str) else paths[layer])
    if not chosen:
        raise InputError(f"upcycle: layers={layers!r} chooses none of {len(paths)} dense feed-forward blocks")
    return list(dict.fromkeys(chosen))
