"""Modules of experts whose weights come and go."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._pairs import sum_in_order
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.permutation import sort_by_expert
from kpt_moe.routing import Routing

from .cache import ExpertCache, Gate, LayerStatistics, predict
from .store import DiskStore, HostStore


class ExpertSource:
    """A module of experts, where their weights come from, and the module as one of a single expert.

    Not for several threads at a time.

    Args:
        network: the module.
        block: the module that holds it.
        paths: at which the model has it.
        number: of the module among those that share the cache.

    Attributes:
        num_experts: how many it has.
        parameters: those that have a slice for each expert, by their paths: all of every module with a matrix
            `[num_experts, outputs, inputs]`.
        shared: the children that have no such matrix; they stay as they are.
        store: where the weights are.
        cache: through which they come.
        next_source: of the module that runs next; None if none does.
        gate: predicts what this module will need, from the tokens of the one before; None if nothing does.
        predicted: what it said that the next call will need.
    """

    store: HostStore | DiskStore
    cache: ExpertCache

    def __init__(self, network: Any, block: nn.Module, paths: list[str], number: int) -> None:
        self.network, self.num_experts = network, int(network.num_experts)
        self.block, self.paths, self.name, self.number = block, paths, paths[0], number
        modules = dict(network.named_modules())
        stacked = [path for path, p in network.named_parameters(remove_duplicate=False) if self._is_sliced(p, 3)]
        of_children = {path.split(".")[0] for path in stacked if "." in path}
        self.shared = {name: child for name, child in network._modules.items() if name not in of_children}
        self.parameters: dict[str, nn.Parameter] = {}
        for path, module in modules.items():
            if path and path.split(".")[0] in self.shared:
                continue
            own = dict(module.named_parameters(prefix=path, recurse=False))
            others = [f"{name} {list(p.shape)}" for name, p in own.items() if not self._is_sliced(p)]
            others += [name for name, _ in module.named_buffers(recurse=False)]
            if others or not stacked:
                raise InputError(
                    f"{type(network).__name__} cannot be offloaded: each parameter of {type(module).__name__} must be "
                    f"[{self.num_experts}, ...], with a slice for each expert, and one [{self.num_experts}, outputs, "
                    f"inputs]; got {', '.join(others) or 'none'}"
                )
            self.parameters |= own
        split = {path: path.rpartition(".") for path in self.parameters}
        self._places = {path: (modules[at]._parameters, name) for path, (at, _, name) in split.items()}
        self._counting = [
            module
            for path, module in modules.items()
            if path.split(".")[0] not in self.shared and getattr(module, "num_experts", None) == self.num_experts
        ]
        self.devices = {path: parameter.device for path, parameter in self.parameters.items()}
        self.expert_bytes = sum(parameter[:1].nbytes for parameter in self.parameters.values())
        self.next_source: ExpertSource | None = None
        self.gate: Gate | None = None
        self.predicted: tuple[int, ...] = ()

    @property
    def statistics(self) -> LayerStatistics:
        """What became of these experts."""
        return self.cache.statistics[self.number]

    def stacked(self, parameter: str) -> Tensor:
        """A parameter of all experts, on the host."""
        return self.store.read(f"{self.name}.{parameter}")

    def open_call(self, needed: list[int], x: Tensor, top_k: int) -> list[int]:
        """Count what is there, begin to load what is not, and give the experts in the order in which to use them."""
        self.statistics.predicted += len(self.predicted)
        self.statistics.predicted_right += len(set(self.predicted).intersection(needed))
        self.predicted = ()
        ahead = self.next_source
        if ahead is not None and ahead.gate is not None:
            ahead.predicted = tuple(predict(ahead.gate, x, top_k))
        predicted = [] if ahead is None else [(ahead.number, expert) for expert in ahead.predicted]
        return [expert for _, expert in self.cache.begin([(self.number, expert) for expert in needed], predicted)]

    @contextmanager
    def only(self, expert: int) -> Iterator[Any]:
        """The module as if it had one expert alone."""
        weights = self.cache.use((self.number, expert))
        before = {path: registry[name] for path, (registry, name) in self._places.items()}
        try:
            self._put(weights, 1)
            yield self.network
        finally:
            self._put(before, self.num_experts)

    def _put(self, parameters: Mapping[str, Any], num_experts: int) -> None:
        for module in self._counting:
            vars(module)["num_experts"] = num_experts
        for path, (registry, name) in self._places.items():
            registry[name] = parameters[path]

    def _is_sliced(self, parameter: Tensor, least: int = 2) -> bool:
        return parameter.dim() >= least and parameter.shape[0] == self.num_experts


class OffloadedExperts(nn.Module):
    """Stands in for a module of experts, whose attributes, children and hooks it has, and computes one at a time.

    What an expert computes depends on its own rows alone, and a token's choices are summed in their order: the result
    is the same to the bit whatever the budget, and whichever experts happen to be on the device. The host waits for
    the routing, since it has to know which experts to bring. Of several threads one computes at a time.

    The stacked parameters are no parameters of this module. Its state dict has them nevertheless, and so do its
    attributes, both read in full from the store.
    """

    def __init__(self, source: ExpertSource) -> None:
        nn.Module.__init__(self)
        own = self.__dict__
        own["_source"] = source  # its network is no child: the parameters are not here
        own["_modules"] = source.shared
        # Shared, so that what watches the network goes on.
        own |= {name: hooks for name, hooks in vars(source.network).items() if name.startswith("_forward_")}
        self.training = source.network.training

    def train(self, mode: bool = True) -> Self:
        """As in `nn.Module`."""
        self._source.network.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse another dtype: the store's numbers would keep theirs, and fit nothing around them."""
        for name, parameter in self._source.parameters.items():
            wanted = fn(torch.empty(0, dtype=parameter.dtype)).dtype
            if parameter.itemsize > 1 and wanted is not parameter.dtype:
                raise InputError(
                    f"{self._source.name}: {name} is offloaded as {parameter.dtype} and can't become {wanted}: "
                    "restore() the model, convert it, and offload it again"
                )
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _choices(self, x: Tensor, index: Tensor, weights: Tensor, compute: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Each row's experts, weighted and summed, for experts that take each token by itself.

        `compute` is one expert, as a module with its parameters, on rows that all go to it.
        """
        self._refuse_gradients(x, weights)
        num_experts, top_k = self._source.num_experts, index.shape[1]
        order, offsets = sort_by_expert(index, num_experts)
        segments = _segments(offsets)
        pairs = x.new_zeros(index.numel(), x.shape[1])
        with self._source.cache.lock:
            for expert in self._source.open_call(list(segments), x, top_k):
                start, end = segments[expert]
                own = order[start:end]
                with self._source.only(expert) as module:
                    pairs.index_copy_(0, own, compute(module, x.index_select(0, own // top_k)).to(x.dtype))
        return sum_in_order(pairs.view(*index.shape, x.shape[1]), index, weights, num_experts).to(x.dtype)

    def _refuse_gradients(self, *tensors: Tensor) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise InputError(
                f"{self._source.name}: offloaded experts are for inference: call the model under torch.no_grad() "
                "or torch.inference_mode(), or restore() it to train"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_source":  # while it is being made
                raise
        if name in self._source.parameters:
            return self._source.stacked(name)
        value = getattr(self._source.network, name)
        if inspect.ismethod(value):
            raise AttributeError(f"{self._source.name} is offloaded: restore() the model to call {name}")
        return value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for parameter in self._source.parameters:
            destination[prefix + parameter] = self._source.stacked(parameter)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if any(prefix + parameter in state_dict for parameter in self._source.parameters):
            error_msgs: list[str] = rest[-1]
            error_msgs.append(f"{self._source.name} is offloaded: restore() the model before loading weights")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"{self._source.name} is offloaded: restore() the model before copying or pickling it")

    def extra_repr(self) -> str:
        """For `print(module)`."""
        source = self._source
        return f"{type(self._source.network).__name__}, {source.num_experts} experts of {source.expert_bytes} bytes"


class OffloadedNetwork(OffloadedExperts, ExpertNetwork):
    """Stands in for a network of KPT's. One that looks at neighbours is given all tokens for each expert."""

    def __init__(self, source: ExpertSource) -> None:
        OffloadedExperts.__init__(self, source)
        self.__dict__["needs_sequences"] = source.network.needs_sequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`."""
        if not self.needs_sequences:
            return routing.apply(x, lambda x, index, w: self._choices(x, index, w, _compute_network)).to(x.dtype)
        return self._whole(x, routing, cu_seqlens)

    def _whole(self, x: Tensor, routing: Routing, cu_seqlens: Tensor | None) -> Tensor:
        self._refuse_gradients(x, routing.weights)
        segments = _segments(sort_by_expert(routing.index, self._source.num_experts).offsets)
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        logits = torch.zeros_like(total[:, :1])  # of one expert
        with self._source.cache.lock:
            self._source.open_call(list(segments), x, routing.top_k)
            for expert in segments:  # in this order, always: it is the order of the sum
                index = torch.where(routing.index == expert, 0, torch.where(routing.index == ~expert, -1, 1))
                weights = torch.where(index == 0, routing.weights, 0)
                with self._source.only(expert) as module:
                    own = replace(routing, index=index, weights=weights, logits=logits)
                    total += module.forward(x, own, cu_seqlens=cu_seqlens)
        return total.to(x.dtype)


class OffloadedTransformersExperts(OffloadedExperts):
    """Stands in for an experts module of transformers; served by KPT's ops whatever `experts_implementation` is."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `kpt_moe.transformers.kpt_experts_forward`."""
        return self._choices(hidden_states, top_k_index, top_k_weights, _compute_transformers)


def _compute_network(module: Any, x: Tensor) -> Tensor:
    index, ones = _all_to_one(x)
    return module.forward(x, Routing(index, ones, ones))  # type: ignore[no-any-return]


def _compute_transformers(module: Any, x: Tensor) -> Tensor:
    from kpt_moe.transformers import kpt_experts_forward, kpt_fp8_experts_forward

    if getattr(module, "activations", "none") != "none":  # of kpt-fp8, which quantises by its own forward alone
        return module.forward(x, *_all_to_one(x))  # type: ignore[no-any-return]
    forward = kpt_fp8_experts_forward if hasattr(module, "down_proj_scale_inv") else kpt_experts_forward
    return forward(module, x, *_all_to_one(x))


def _all_to_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index and weights that send every row to expert 0, unweighted: weights are applied in one place, unrounded."""
    wide = torch.promote_types(x.dtype, torch.float32)
    shape, device = (x.shape[0], 1), x.device
    return torch.zeros(shape, dtype=torch.int64, device=device), torch.ones(shape, dtype=wide, device=device)


def _segments(offsets: Tensor) -> dict[int, tuple[int, int]]:
    """First and end row of every expert that has rows; waits for the device."""
    ends = offsets.tolist()
    return {
        expert: (start, end) for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start
    }
