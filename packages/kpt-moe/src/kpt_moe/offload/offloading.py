"""Putting the experts of a model into a store, and taking them back."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.rewrites import is_transformers_experts

from .cache import ExpertCache, Key, LayerStatistics, bytes_of
from .offloaded_experts import ExpertSource, OffloadedExperts, OffloadedNetwork, OffloadedTransformersExperts
from .one_expert import stacked_parameters
from .prefetch import Prefetcher, find_gate
from .store import DiskStore, ExpertStore, HostStore, StackedExperts
from .transfer import ExpertWeights, Transfer


@dataclass
class _Layer:
    """An experts module, the paths at which the model has it, and the module that holds it at the first of them."""

    network: nn.Module
    paths: list[str]
    block: nn.Module

    @property
    def name(self) -> str:
        return self.paths[0]

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that have a slice for each expert, by their paths in the network."""
        return stacked_parameters(self.network, self.network.num_experts)  # type: ignore[arg-type]


class Offloading:
    """A model whose experts are offloaded; as a context manager it restores the model at the end.

    Attributes:
        store: where the experts are.
        budget: bytes of experts on the compute device at most.
        expert_bytes: bytes of all experts.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, layers: list[_Layer], sources: list[ExpertSource]
    ) -> None:
        self.store = sources[0].store
        self.budget = sources[0].cache.budget
        self.expert_bytes = sum(source.what.num_experts * source.what.expert_bytes for source in sources)
        self._model = model
        self._layers = layers
        self._device = device
        self._sources = sources
        self._originals = [{key: p.device for key, p in layer.parameters.items()} for layer in layers]
        self._restored = False
        for layer, source in zip(layers, sources, strict=True):
            ours = isinstance(layer.network, ExpertNetwork)
            stand_in = (OffloadedNetwork if ours else OffloadedTransformersExperts)(layer.network, source)  # type: ignore[arg-type]
            for path in layer.paths:
                model.set_submodule(path, stand_in)
            for parameter in layer.parameters.values():
                if not parameter.is_meta:
                    parameter.data = parameter.data.new_empty(0)

    def statistics(self) -> dict[str, LayerStatistics]:
        """What became of the experts of each module, by its path."""
        return {source.what.name: source.statistics for source in self._sources}

    def total(self) -> LayerStatistics:
        """The sum over all modules."""
        total = LayerStatistics(prefetch=f"{sum(s.gate is not None for s in self._sources)} modules are predicted")
        for field in fields(LayerStatistics):
            if field.name != "prefetch":
                setattr(total, field.name, sum(getattr(source.statistics, field.name) for source in self._sources))
        return total

    def restore(self) -> None:
        """Put every module and its weights back, onto the devices on which they were; a second time does nothing.

        Weights that were on `meta` come onto the compute device. A file stays.
        """
        if self._restored:
            return
        # Read first: if that fails, the model stays offloaded and whole.
        weights = [{key: self.store.stacked(layer.name, key) for key in layer.parameters} for layer in self._layers]
        if self._sources[0].prefetcher is not None:
            self._sources[0].prefetcher.close()
        for layer, devices, own in zip(self._layers, self._originals, weights, strict=True):
            for key, parameter in layer.parameters.items():
                if devices[key].type == "meta":
                    real = own[key].to(self._device)
                    path, _, name = key.rpartition(".")
                    owner = layer.network.get_submodule(path)
                    setattr(owner, name, nn.Parameter(real, requires_grad=parameter.requires_grad))
                else:
                    parameter.data = own[key].to(devices[key])
            for path in layer.paths:
                self._model.set_submodule(path, layer.network)
        self._sources[0].cache.clear()
        self._restored = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def offload_experts(
    model: nn.Module,
    budget: float | str,
    *,
    store: str | os.PathLike[str] = "host",
    device: torch.device | str | None = None,
    prefetch: bool = True,
) -> Offloading:
    """Keep a model's experts elsewhere, and on the compute device at most `budget` bytes of them, for inference.

    Served are the networks of KPT's layers and the experts modules of transformers. The rest of the model stays as it
    is. Results are the same to the bit for every budget; their order of summation is not that of `moe.experts`, so
    they differ from those of the model before by roundings.

    On the CPU a budget saves memory with a store on disk alone: with `"host"` the copies come on top.

    Args:
        model: changed in place; the modules that run one after the other must be registered in that order for the
            prefetch to be of use.
        budget: bytes, a string like `512MiB` or `1.5GB`, or a share of all experts like `25%`. Experts that are on
            their way count; activations do not, nor does what an accelerator's allocator keeps.
        store: `"host"` for host memory, page-locked if the compute device is an accelerator; else the path of a
            safetensors file, which is written and must not exist yet. If the experts' parameters are on `meta`, the
            file is read instead: so a model larger than the host's memory is run.
        device: the compute device; None is that of the parameters that are not experts'.
        prefetch: load in a background thread what a call lacks, and what the next layer's router, run on this layer's
            tokens, says that it will need (arXiv:2312.17238).

    Returns:
        The handle, with statistics and `restore()`.

    Raises:
        InputError: the model has no experts that can be offloaded, the budget is less than one expert, or the file
            cannot be written or read.
    """
    layers = _find_layers(model)
    whats = [_describe(layer, model) for layer in layers]
    sizes = [what.expert_bytes for what in whats]
    total = sum(what.num_experts * what.expert_bytes for what in whats)
    target = torch.device(device) if device is not None else _device_of(model, layers)
    transfer = Transfer(target)
    names = [layer.name for layer in layers]

    def load(key: Key) -> ExpertWeights:
        number, expert = key
        what = whats[number]
        return transfer({name: kept.expert(what.name, name, expert) for name in what.parameters})

    cache = ExpertCache(bytes_of(budget, total), load, sizes, names)
    kept = _store(store, layers, whats, pin=target.type != "cpu")
    prefetcher = Prefetcher(cache) if prefetch else None
    sources = [ExpertSource(number, what, kept, cache, prefetcher) for number, what in enumerate(whats)]
    for i, (source, layer) in enumerate(zip(sources, layers, strict=True)):
        source.statistics.prefetch = "no prefetch: switched off"
        if prefetch and i == 0:
            source.statistics.prefetch = "no prefetch: no module of experts comes before"
        elif prefetch:
            sizes_of_tokens = [_hidden_size(layers[j].network) for j in (i - 1, i)]
            gate = find_gate(layer.block, source.what.num_experts, *sizes_of_tokens)
            sources[i - 1].next_source = source
            source.gate = None if isinstance(gate, str) else gate
            source.statistics.prefetch = gate if isinstance(gate, str) else "router lookahead"
    return Offloading(model, target, layers, sources)


def _find_layers(model: nn.Module) -> list[_Layer]:
    found: dict[int, _Layer] = {}
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, OffloadedExperts):
            raise InputError(f"{path or type(model).__name__} is offloaded already: restore() it first")
        if module in inner or not (isinstance(module, ExpertNetwork) or is_transformers_experts(module)):
            continue
        inner.update(child for child in module.modules() if child is not module)
        if not path:
            raise InputError(f"{type(model).__name__} is itself a module of experts: pass the module that holds it")
        block = model.get_submodule(path.rpartition(".")[0])
        found.setdefault(id(module), _Layer(module, [], block)).paths.append(path)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts that can be offloaded: neither networks of KPT's layers nor "
            "experts modules of transformers"
        )
    return list(found.values())


def _describe(layer: _Layer, model: nn.Module) -> StackedExperts:
    """What the module keeps in the store, once it is sure that one expert can be computed without the others."""
    network: Any = layer.network
    if "forward" in vars(network):
        raise InputError(f"{layer.name} has a forward of its own (hooks of accelerate?): remove it before offloading")
    parameters = layer.parameters
    if any(hasattr(parameter, "to_local") for parameter in parameters.values()):
        raise InputError(
            f"{layer.name} is spread over ranks (its parameters are DTensors) and cannot be offloaded: "
            "offload experts that one process has whole"
        )
    ids = {id(parameter) for parameter in parameters.values()}
    own = set(network.modules())
    for path, module in model.named_modules():
        if module not in own and any(id(p) in ids for p in module.parameters(recurse=False)):
            raise InputError(f"{layer.name} cannot be offloaded: it shares parameters with {path or 'the model'}")
    return StackedExperts.of(layer.name, network.num_experts, parameters)


def _hidden_size(network: Any) -> int:
    if isinstance(network, ExpertNetwork):
        return network.hidden_size
    up = network.gate_up_proj if network.has_gate else network.up_proj
    return int(up.shape[1 if network.is_transposed else 2])


def _device_of(model: nn.Module, layers: list[_Layer]) -> torch.device:
    experts = [parameter for layer in layers for parameter in layer.parameters.values()]
    ids = {id(parameter) for parameter in experts}
    device = next((p.device for p in model.parameters() if id(p) not in ids), experts[0].device)
    if device.type == "meta":
        raise InputError("the model is on 'meta': say on which device to compute, as in device='cpu'")
    return device


def _store(
    where: str | os.PathLike[str], layers: list[_Layer], whats: list[StackedExperts], *, pin: bool
) -> ExpertStore:
    parameters: Mapping[str, Mapping[str, Tensor]] = {layer.name: layer.parameters for layer in layers}
    on_meta = [parameter.is_meta for own in parameters.values() for parameter in own.values()]
    if any(on_meta) and (where == "host" or not all(on_meta)):
        raise InputError(
            "experts on 'meta' have no weights: give the path of a file that holds those of all of them as store"
        )
    if where == "host":
        return HostStore(parameters, pin=pin)
    if not any(on_meta):
        DiskStore.write(where, parameters)
    return DiskStore(where, {what.name: what for what in whats})
