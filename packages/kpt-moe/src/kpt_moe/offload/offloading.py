"""Putting the experts of a model into a store, and taking them back."""

import os
from dataclasses import fields
from typing import Any, Self

import torch
from torch import nn

from kpt_core import InputError
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.hf_modules import is_transformers_experts

from .cache import ExpertCache, ExpertWeights, Key, LayerStatistics, bytes_of, find_gate
from .offloaded_experts import ExpertSource, OffloadedExperts, OffloadedNetwork, OffloadedTransformersExperts
from .store import DiskStore, HostStore, Transfer


class Offloading:
    """A model whose experts are offloaded; as a context manager it restores the model at the end.

    Attributes:
        budget: bytes of experts on the compute device at most.
        expert_bytes: bytes of all experts.
    """

    def __init__(self, model: nn.Module, device: torch.device, sources: list[ExpertSource]) -> None:
        self._cache = sources[0].cache
        self.budget = self._cache.budget
        self.expert_bytes = sum(source.num_experts * source.expert_bytes for source in sources)
        self._model, self._device, self._sources = model, device, sources
        self._restored = False
        for source in sources:
            ours = isinstance(source.network, ExpertNetwork)
            self._place(source, (OffloadedNetwork if ours else OffloadedTransformersExperts)(source))
            for parameter in source.parameters.values():
                if not parameter.is_meta:
                    parameter.data = parameter.data.new_empty(0)

    def statistics(self) -> dict[str, LayerStatistics]:
        """What became of the experts of each module, by its path."""
        return {source.name: source.statistics for source in self._sources}

    def total(self) -> LayerStatistics:
        """The sum over all modules."""
        total = LayerStatistics(prefetch=f"{sum(s.gate is not None for s in self._sources)} modules are predicted")
        for name in (each.name for each in fields(LayerStatistics) if each.name != "prefetch"):
            setattr(total, name, sum(getattr(source.statistics, name) for source in self._sources))
        return total

    def restore(self) -> None:
        """Put every module and its weights back, onto the devices on which they were; a second time does nothing.

        Weights that were on `meta` come onto the compute device. A file stays.
        """
        if self._restored:
            return
        # Read first: if that fails, the model stays offloaded and whole.
        weights = [{path: source.stacked(path) for path in source.parameters} for source in self._sources]
        for source, own in zip(self._sources, weights, strict=True):
            for path, parameter in source.parameters.items():
                if parameter.is_meta:
                    at, _, name = path.rpartition(".")
                    real = nn.Parameter(own[path].to(self._device), requires_grad=parameter.requires_grad)
                    setattr(source.network.get_submodule(at), name, real)
                else:
                    parameter.data = own[path].to(source.devices[path])
            self._place(source, source.network)
        self._cache.close()
        self._restored = True

    def _place(self, source: ExpertSource, module: nn.Module) -> None:
        for path in source.paths:
            self._model.set_submodule(path, module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
    sources = _find_experts(model)
    parameters = {f"{source.name}.{path}": p for source in sources for path, p in source.parameters.items()}
    target = torch.device(device) if device is not None else _device_of(model, parameters)
    total = sum(source.num_experts * source.expert_bytes for source in sources)
    transfer = Transfer(target)

    def load(key: Key) -> ExpertWeights:
        number, expert = key
        source = sources[number]
        return transfer({path: kept.read(f"{source.name}.{path}", expert) for path in source.parameters})

    sizes, names = [source.expert_bytes for source in sources], [source.name for source in sources]
    cache = ExpertCache(bytes_of(budget, total), load, sizes, names, background=prefetch)
    kept = _store(store, parameters, pin=target.type != "cpu")
    before: ExpertSource | None = None
    for source in sources:
        source.cache, source.store = cache, kept
        source.statistics.prefetch = "no prefetch: switched off"
        if prefetch:
            source.statistics.prefetch = _look_ahead(before, source)
        before = source
    return Offloading(model, target, sources)


def _look_ahead(before: ExpertSource | None, source: ExpertSource) -> str:
    """Let the module before predict what a module needs; how it does, or why it does not."""
    if before is None:
        return "no prefetch: no module of experts comes before"
    size = _hidden_size(before.network)
    source.gate = find_gate(source.block, source.num_experts, size)
    before.next_source = source
    if source.gate is not None:
        return "router lookahead"
    return (
        f"no prefetch: {type(source.block).__name__} has neither a router of KPT's nor a gate with a weight "
        f"[{source.num_experts}, {size}], for tokens of the block before"
    )


def _find_experts(model: nn.Module) -> list[ExpertSource]:
    found: dict[nn.Module, ExpertSource] = {}
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, OffloadedExperts):
            raise InputError(f"{path or type(model).__name__} is offloaded already: restore() it first")
        if module in inner or not (isinstance(module, ExpertNetwork) or is_transformers_experts(module)):
            continue
        inner.update(child for child in module.modules() if child is not module)
        if not path:
            raise InputError(f"{type(model).__name__} is itself a module of experts: pass the module that holds it")
        if module in found:
            found[module].paths.append(path)
        else:
            block = model.get_submodule(path.rpartition(".")[0])
            found[module] = ExpertSource(module, block, [path], len(found))
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts that can be offloaded: neither networks of KPT's layers nor "
            "experts modules of transformers"
        )
    for source in found.values():
        _check(source, model)
    return list(found.values())


def _check(source: ExpertSource, model: nn.Module) -> None:
    """Raise `InputError` unless one expert can be computed without the others."""
    if "forward" in vars(source.network):
        raise InputError(f"{source.name} has a forward of its own (hooks of accelerate?): remove it before offloading")
    if any(hasattr(parameter, "to_local") for parameter in source.parameters.values()):
        raise InputError(
            f"{source.name} is spread over ranks (its parameters are DTensors) and cannot be offloaded: "
            "offload experts that one process has whole"
        )
    ids = {id(parameter) for parameter in source.parameters.values()}
    own = set(source.network.modules())
    for path, module in model.named_modules():
        if module not in own and any(id(p) in ids for p in module.parameters(recurse=False)):
            raise InputError(f"{source.name} cannot be offloaded: it shares parameters with {path or 'the model'}")


def _hidden_size(network: Any) -> int:
    if isinstance(network, ExpertNetwork):
        return network.hidden_size
    up = network.gate_up_proj if network.has_gate else network.up_proj
    return int(up.shape[1 if network.is_transposed else 2])


def _device_of(model: nn.Module, experts: dict[str, nn.Parameter]) -> torch.device:
    ids = {id(parameter) for parameter in experts.values()}
    others = (parameter.device for parameter in model.parameters() if id(parameter) not in ids)
    device = next(others, next(iter(experts.values())).device)
    if device.type == "meta":
        raise InputError("the model is on 'meta': say on which device to compute, as in device='cpu'")
    return device


def _store(where: str | os.PathLike[str], parameters: dict[str, nn.Parameter], *, pin: bool) -> HostStore | DiskStore:
    on_meta = [parameter.is_meta for parameter in parameters.values()]
    if any(on_meta) and (where == "host" or not all(on_meta)):
        raise InputError(
            "experts on 'meta' have no weights: give the path of a file that holds those of all of them as store"
        )
    if where == "host":
        return HostStore(parameters, pin=pin)
    if not any(on_meta):
        DiskStore.write(where, parameters)
    return DiskStore(where, parameters)
