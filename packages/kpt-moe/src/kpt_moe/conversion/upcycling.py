"""Make dense feed-forward blocks sparse, with experts that begin as copies of them; and read such models from files."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_known, require_number, require_size
from kpt_moe._mixed import Mixed, mixed
from kpt_moe.layers import MoEConfig, MoELayer

from ._dense import DenseBlock, projections
from .blocks import moe_blocks, replace_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Which blocks: all, the second, fourth, ... (Sparse Upcycling), or these, by their number or path.
Layers = Literal["all", "every-other"] | Sequence[int | str]

#: Fields of `MoEConfig` that do not follow from the dense block and the other arguments.
_FREE = frozenset(
    {"score", "renormalize", "capacity_factor", "eval_capacity_factor", "router_options", "expert_options"}
)
#: What the files call such a model, so that nobody takes it for the dense one.
_NAME = "kpt_upcycled"


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
        The model; the layer itself if `model` is a block. `save_pretrained` writes the model for `load_upcycled`.

    Raises:
        InputError: there is no such block, or one computes something else than our experts can; a number is out of
            range; a field of `config` follows from something else. `model` is then unchanged.
        UnknownNameError: a path or field that there is not.

    Examples:
        >>> model = upcycle(LlamaForCausalLM.from_pretrained(name), num_experts=8, top_k=2, layers="every-other")
    """
    for name in config:
        if name not in _FREE and name in {field.name for field in fields(MoEConfig)}:
            raise InputError(f"upcycle: {name} follows from the dense block and the other arguments: leave it out")
        require_known("field of MoEConfig", name, _FREE)
    require_size("upcycle", "num_experts", num_experts)
    require_size("upcycle", "top_k", top_k, num_experts, "num_experts")
    require_size("upcycle", "granularity", granularity)
    require_bools("upcycle", shared=shared)
    for name, value in (("noise", noise), ("reinit_fraction", reinit_fraction), ("router_std", router_std)):
        require_number("upcycle", name, value, "at least 0" + " and at most 1" * (name == "reinit_fraction"))
    scale = granularity * (0.5 if shared else 1.0)
    config["router_options"] = {"scale": scale, **config.get("router_options", {})}
    plans = {}
    for path in _chosen(_dense_blocks(model), layers, model):
        block = model.get_submodule(path)
        dense = DenseBlock.of(block)
        if dense.intermediate_size % granularity:
            raise InputError(
                f"upcycle: granularity must divide the inner width {dense.intermediate_size} of "
                f"{type(block).__name__}; got {granularity}"
            )
        plans[path] = (
            dense,
            MoEConfig(
                hidden_size=dense.hidden_size,
                num_experts=num_experts * granularity,
                top_k=top_k * granularity,
                intermediate_size=dense.intermediate_size // granularity,
                activation=dense.activation,
                bias=dense.bias,
                num_shared_experts=int(shared),
                shared_intermediate_size=dense.intermediate_size if shared else None,
                **config,
            ),
        )

    @torch.no_grad()
    def sparse(path: str, block: nn.Module) -> Any:
        layer = _layer(block, *plans[path], num_experts, router_std, generator)
        _reinitialise(layer.experts, reinit_fraction, generator)
        for weight in (layer.experts.gate_up_proj, layer.experts.down_proj) if noise else ():
            normal = torch.empty_like(weight).normal_(generator=generator)
            weight.add_(normal * (noise * weight.std(dim=(1, 2), keepdim=True)))
        return layer

    upcycled = replace_modules(model, plans, sparse, inplace=inplace)
    _describe(upcycled, {path: config for path, (_, config) in plans.items()})
    return upcycled


def load_upcycled(folder: str | PathLike[str], **options: Any) -> "PreTrainedModel":
    """Load what `save_pretrained` wrote of an upcycled model.

    transformers has no such family: without KPT, `from_pretrained` refuses the folder as of an unknown `model_type`.

    Args:
        folder: a path, or a name on the hub.
        options: further arguments of `from_pretrained`: `dtype`, `device_map`, ...

    Returns:
        A model of the dense model's class with `MoELayer` in the place of some blocks, as `upcycle` gave.

    Raises:
        InputError: the folder has another model, or tensors that are not those of the layers which it describes.

    Examples:
        >>> upcycle(LlamaForCausalLM.from_pretrained(name), 8, 2).save_pretrained("sparse")
        >>> model = load_upcycled("sparse")
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found, _ = transformers.PreTrainedConfig.get_config_dict(folder)
    if _NAME not in found:
        raise InputError(
            f"load_upcycled: {folder} holds a model of type {found.get('model_type')!r} that was not upcycled: load it "
            "with transformers' AutoModelForCausalLM.from_pretrained"
        )
    dense = found[_NAME]["model_type"]
    config = CONFIG_MAPPING[dense].from_dict({**found, "model_type": dense})
    config.__class__ = mixed(_SavedAsUpcycled, type(config))
    kind: Any = getattr(transformers, found["architectures"][0])
    options = {**options, "config": config, "output_loading_info": True}
    model, report = _with_layers(kind).from_pretrained(folder, **options)
    wrong = {what: sorted(map(str, names)) for what, names in report.items() if names}
    if wrong:
        raise InputError(
            f"load_upcycled: {folder} has other tensors than the layers that its config.json describes: {wrong}. Were "
            "layers changed after upcycle? Such a model is kept by torch.save(model.state_dict())"
        )
    model.__class__ = kind
    return model  # type: ignore[no-any-return]


def _layer(
    block: nn.Module,
    dense: DenseBlock,
    config: MoEConfig,
    copies: int,
    router_std: float,
    generator: torch.Generator | None,
) -> Any:
    """The layer in the place of a block, its experts copies or parts of copies of the block."""
    tensors = dense.tensors(block)
    down, parts = tensors["down_proj"], config.num_experts // copies
    layer = MoELayer(config, device="meta", dtype=down.dtype).to_empty(device=down.device)
    router: Any = layer.router
    router.reset_parameters()
    rows = torch.empty_like(router.weight[::parts]).normal_(std=router_std, generator=generator)
    router.weight.copy_(rows.repeat_interleave(parts, 0))
    for name, tensor in tensors.items():
        if name == "down_proj":
            cut = tensor.unflatten(1, (parts, -1)).movedim(1, 0)
        elif name == "down_proj_bias":
            cut = (tensor / parts).expand(parts, -1)
        else:
            cut = tensor.unflatten(0, (-1, parts, config.expert_width)).transpose(0, 1).flatten(1, 2)
        layer.experts.get_parameter(name).copy_(torch.cat([cut] * copies))
    if layer.shared_experts is not None:
        for name, tensor in tensors.items():
            linear = layer.shared_experts.get_submodule(name.removesuffix("_bias"))
            kept = linear.get_parameter("bias" if name.endswith("_bias") else "weight")
            kept.copy_(tensor / 2 if linear is layer.shared_experts.down_proj else tensor)
    return layer.train(block.training)


def _reinitialise(experts: Any, fraction: float, generator: torch.Generator | None) -> None:
    inner = experts.intermediate_size
    count = int(fraction * inner)
    for expert in range(experts.num_experts if count else 0):
        units = torch.randperm(inner, device=experts.down_proj.device, generator=generator)[:count]
        for matrix in (*experts.gate_up_proj[expert].split(inner), experts.down_proj[expert].mT):
            old = matrix[units].float()
            new = torch.empty_like(old).normal_(generator=generator)
            matrix[units] = (new * old.std(correction=0) + old.mean()).to(matrix.dtype)


def _dense_blocks(model: nn.Module) -> list[str]:
    """The paths of dense feed-forward blocks, those that are part of a Mixture-of-Experts block left out."""
    sparse = [path for path, _ in moe_blocks(model)]
    sparse += [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, MoELayer)]
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if projections(module) is not None and not any(f"{path}.".startswith(f"{outer}.") for outer in sparse)
    ]


def _chosen(paths: list[str], layers: Layers, model: nn.Module) -> list[str]:
    if not paths:
        raise InputError(f"upcycle: {type(model).__name__} has no dense feed-forward block of known projections")
    if isinstance(layers, str):
        require_known("choice of layers", layers, ("all", "every-other"))
        chosen = paths if layers == "all" else paths[1::2]
    else:
        for layer in layers:
            if isinstance(layer, str):
                require_known("path of a dense feed-forward block", layer, paths)
            elif not 0 <= layer < len(paths):
                raise InputError(f"upcycle: layers must be from 0 to {len(paths) - 1}; got {layer}")
        chosen = [layer if isinstance(layer, str) else paths[layer] for layer in layers]
    if not chosen:
        raise InputError(f"upcycle: layers={layers!r} chooses none of {len(paths)} dense feed-forward blocks")
    return list(dict.fromkeys(chosen))


def _describe(model: nn.Module, layers: dict[str, MoEConfig]) -> None:
    """Note in the configuration of a model of transformers which layers it has, for its files."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "base_model_prefix") or config is None:
        return
    noted = getattr(config, _NAME, {"model_type": config.model_type, "layers": {}})
    described = {path: asdict(layer) for path, layer in layers.items()}
    setattr(config, _NAME, {**noted, "layers": {**noted["layers"], **described}})
    config.__class__ = mixed(_SavedAsUpcycled, type(config))


class _SavedAsUpcycled(Mixed):
    """Makes of a configuration one whose file has a type of its own."""

    def to_diff_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        return {**kept, "model_type": _NAME}


def _with_layers(kind: Any) -> Any:
    """A class of models whose blocks are replaced as soon as they are made."""

    def start(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        layers = getattr(config, _NAME)["layers"]
        replace_modules(self, layers, lambda path, block: MoELayer(MoEConfig(**layers[path])), inplace=True)

    # In transformers' own module: its mappings of names are for its own classes.
    return type(kind.__name__, (kind,), {"__init__": start, "__module__": kind.__module__})
