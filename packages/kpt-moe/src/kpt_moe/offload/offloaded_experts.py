"""Modules of experts whose weights come and go."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.permutation import sort_by_expert
from kpt_moe.routing import Routing

from .cache import ExpertCache, Key, LayerStatistics
from .one_expert import OneExpert, shared_children
from .prefetch import Gate, Prefetcher, predict
from .store import ExpertStore, StackedExperts
from .transfer import ExpertWeights

#: What a module is watched by: shared with the module that is replaced, so that it goes on.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass
class ExpertSource:
    """Where a module's experts come from.

    Attributes:
        number: of the module among those that share the cache.
        what: its parameters.
        store: where they are.
        cache: through which they come.
        prefetcher: loads them in the background; None if nothing does.
        next_source: of the module that runs next; None if none does.
        gate: predicts what this module will need, from the tokens of the one before; None if nothing does.
    """

    number: int
    what: StackedExperts
    store: ExpertStore
    cache: ExpertCache
    prefetcher: Prefetcher | None = None
    next_source: "ExpertSource | None" = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        self._calls = threading.local()

    @property
    def statistics(self) -> LayerStatistics:
        """What became of these experts."""
        return self.cache.statistics[self.number]

    def open_call(self, needed: list[int], x: Tensor, top_k: int) -> list[int]:
        """Count what is there, request what is not, and give the experts in the order in which to use them.

        Those on the device come first: what is loaded for the others could drop them.
        """
        keys = self._keys(needed)
        call, there = self.cache.begin(keys)
        predicted: set[int] = getattr(self._calls, "predicted", set())
        self._calls.predicted = set()
        self.statistics.predicted += len(predicted)
        self.statistics.predicted_right += len(predicted.intersection(needed))
        ordered = sorted(range(len(needed)), key=lambda i: not there[i])
        if self.prefetcher is not None:
            missing = [keys[i] for i in ordered if not there[i]]
            self.prefetcher.request(call, missing, self._lookahead(x, top_k))
        return [needed[i] for i in ordered]

    @contextmanager
    def use(self, expert: int) -> Iterator[ExpertWeights]:
        """Hold one expert on the device."""
        key = (self.number, expert)
        if self.prefetcher is not None:
            self.prefetcher.withdraw(key)
        with self.cache.use(key) as weights:
            weights.wait()
            yield weights

    def _lookahead(self, x: Tensor, top_k: int) -> list[Key]:
        source = self.next_source
        if source is None or source.gate is None:
            return []
        experts = predict(source.gate, x, top_k)
        source._calls.predicted = set(experts)
        return source._keys(experts)

    def _keys(self, experts: list[int]) -> list[Key]:
        return [(self.number, expert) for expert in experts]


class OffloadedExperts(nn.Module):
    """Stands in for a module of experts, whose attributes, children and hooks it has, and computes one at a time.

    What an expert computes depends on its own rows alone, and a token's choices are summed in their order: the result
    is the same to the bit whatever the budget, and whichever experts happen to be on the device. The host waits for
    the routing, since it has to know which experts to bring.

    The stacked parameters are no parameters of this module. Its state dict has them nevertheless, and so do its
    attributes, both read in full from the store.

    Args:
        network: what it stands in for.
        source: where its experts come from.
    """

    def __init__(self, network: nn.Module, source: ExpertSource) -> None:
        nn.Module.__init__(self)
        own = self.__dict__
        own["_network"] = network  # not as a child: its parameters are not here
        own["_source"] = source
        own["_stacked"] = source.what.num_experts, tuple(source.what.parameters)
        own["_twins"] = threading.local()
        own["_modules"] = shared_children(network, source.what.num_experts)
        for hooks in _HOOKS:
            own[hooks] = vars(network)[hooks]
        self.training = network.training

    def _choices(self, x: Tensor, index: Tensor, weights: Tensor, compute: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """Each row's experts, weighted and summed, for experts that take each token by itself.

        Args:
            x: `[rows, hidden_size]`.
            index: `[rows, K]`, as in `Routing`.
            weights: `[rows, K]`.
            compute: one expert, as a module with its parameters, on rows that all go to it.
        """
        self._refuse_gradients(x, weights)
        num_experts, top_k = self._source.what.num_experts, index.shape[1]
        order, offsets = sort_by_expert(index, num_experts)
        segments = _segments(offsets)
        pairs = x.new_zeros(index.numel(), x.shape[1])
        for expert in self._source.open_call(list(segments), x, top_k):
            start, end = segments[expert]
            own = order[start:end]
            with self._one_expert(expert) as module:
                pairs.index_copy_(0, own, compute(module, x.index_select(0, own // top_k)).to(x.dtype))
        wide = torch.promote_types(torch.promote_types(x.dtype, weights.dtype), torch.float32)
        counted = torch.where((index >= 0) & (index < num_experts), weights, 0).to(wide)
        by_choice = pairs.view(*index.shape, x.shape[1])
        total = torch.zeros(x.shape, dtype=wide, device=x.device)
        for choice in range(top_k):
            total += by_choice[:, choice] * counted[:, choice, None]
        return total.to(x.dtype)

    @contextmanager
    def _one_expert(self, expert: int) -> Iterator[Any]:
        """The module that this stands in for, as if it had one expert alone."""
        twin = getattr(self._twins, "twin", None)
        if twin is None:
            # One for each thread, since weights are put into it.
            twin = self._twins.twin = OneExpert(self._network, *self._stacked)
        with self._source.use(expert) as weights, twin.holding(weights.parameters, self.training) as module:
            yield module

    def _refuse_gradients(self, *tensors: Tensor) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise InputError(
                f"{self._source.what.name}: offloaded experts are for inference: call the model under torch.no_grad() "
                "or torch.inference_mode(), or restore() it to train"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_network", "_source"):  # while it is being made
                raise
        if name in self._source.what.parameters:
            return self._source.store.stacked(self._source.what.name, name)
        value = getattr(self._network, name)
        if inspect.ismethod(value):
            raise AttributeError(f"{self._source.what.name} is offloaded: restore() the model to call {name}")
        return value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for parameter in self._source.what.parameters:
            destination[prefix + parameter] = self._source.store.stacked(self._source.what.name, parameter)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if any(prefix + parameter in state_dict for parameter in self._source.what.parameters):
            error_msgs.append(f"{self._source.what.name} is offloaded: restore() the model before loading weights")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"{self._source.what.name} is offloaded: restore() the model before copying or pickling it")

    def extra_repr(self) -> str:
        """For `print(module)`."""
        what = self._source.what
        return f"{type(self._network).__name__}, {what.num_experts} experts of {what.expert_bytes} bytes"


class OffloadedNetwork(OffloadedExperts, ExpertNetwork):
    """Stands in for a network of KPT's. One that looks at neighbours is given all tokens for each expert."""

    def __init__(self, network: ExpertNetwork, source: ExpertSource) -> None:
        OffloadedExperts.__init__(self, network, source)
        self.__dict__["needs_sequences"] = network.needs_sequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`."""
        if not self.needs_sequences:
            return routing.apply(x, lambda x, index, w: self._choices(x, index, w, _compute_network)).to(x.dtype)
        return self._whole(x, routing, cu_seqlens)

    def _whole(self, x: Tensor, routing: Routing, cu_seqlens: Tensor | None) -> Tensor:
        self._refuse_gradients(x, routing.weights)
        segments = _segments(sort_by_expert(routing.index, self._source.what.num_experts).offsets)
        self._source.open_call(list(segments), x, routing.top_k)
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        logits = torch.zeros_like(total[:, :1])  # of one expert
        for expert in segments:  # in this order, always: it is the order of the sum
            index = torch.where(routing.index == expert, 0, torch.where(routing.index == ~expert, -1, 1))
            weights = torch.where(index == 0, routing.weights, 0)
            with self._one_expert(expert) as module:
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
    from kpt_moe.transformers import kpt_experts_forward

    return kpt_experts_forward(module, x, *_all_to_one(x))


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
