"""Counts of what routers decide, kept on their device and read nowhere on the host."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from .routers import Router
from .routing import Routing

_library = torch.library.Library("kpt_moe", "FRAGMENT")
_library.define("accumulate(Tensor(a!) total, Tensor counts) -> ()")


def in_recomputation() -> bool:
    """Whether this forward is one of activation checkpointing, which repeats it inside of backward.

    Such a run is no new decision. In a function that is being compiled it is not known yet: False.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


# An op, since a compiled forward inside of a checkpointed region must ask this when it runs, not when it is traced.
@torch.library.impl(_library, "accumulate", "CompositeExplicitAutograd")
def _accumulate(total: Tensor, counts: Tensor) -> None:
    if not in_recomputation():
        total.add_(counts)


@torch.library.register_fake("kpt_moe::accumulate", lib=_library)  # type: ignore[untyped-decorator]
def _accumulate_fake(total: Tensor, counts: Tensor) -> None:
    return None


class Counter:
    """A forward hook of a router that counts what it decides; pickled and copied with its module.

    `total` is int64: load and asked of each expert, dropped, tokens. It is no buffer: DistributedDataParallel would
    give every rank the first one's. It follows the tokens.
    """

    def __init__(self, router: Router, training_only: bool) -> None:
        device = next((tensor.device for tensor in router.parameters()), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        self.total = torch.zeros(2 * router.num_experts + 2, dtype=torch.int64, device=device)
        self.training_only = training_only

    def __call__(self, router: nn.Module, args: Any, routing: Routing) -> None:
        if self.training_only and not router.training:
            return
        numbers = torch.stack((routing.dropped(), routing.counted_tokens()))
        counts = torch.cat((routing.tokens_per_expert(), routing.asked_per_expert(), numbers))
        if self.total.device != counts.device:
            # A tensor that inference mode makes could not be added to outside of it.
            with torch.inference_mode(False):
                self.total = self.total.to(counts.device)
        torch.ops.kpt_moe.accumulate(self.total, counts)


class Hooked:
    """Hooks on modules, until they are detached; a context manager that detaches them."""

    _handles: list[RemovableHandle]

    def detach(self) -> None:
        """Remove the hooks. Doing it twice does no harm."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


class RouterCounts(Hooked):
    """Counters on some routers of a model, until they are detached; a context manager that detaches them.

    What `torch.compile` has compiled so far is compiled again at its next call: it would not run the new hooks.
    """

    def __init__(self, routers: Mapping[str, Router], *, training_only: bool) -> None:
        self._routers = dict(routers)
        self._counters = {path: Counter(router, training_only) for path, router in routers.items()}
        self._handles = [routers[path].register_forward_hook(c) for path, c in self._counters.items()]
        _compile_again()

    def detach(self) -> None:
        """Stop counting; the counts stay. Doing it twice does no harm."""
        super().detach()
        _compile_again()

    def reset(self) -> None:
        """Set every count to zero."""
        for counter in self._counters.values():
            counter.total.zero_()

    def _sum_over_ranks(self, groups: Sequence[distributed.ProcessGroup | None]) -> None:
        """Sum over the ranks of each group, one all-reduce per group for all routers; nothing without a process group.

        None is the default group.
        """
        if not distributed.is_available() or not distributed.is_initialized():
            return
        flat = self._flat()
        for group in groups:
            distributed.all_reduce(flat, group=group)
        for counter, counts in zip(self._counters.values(), self._split(flat), strict=True):
            counter.total.copy_(counts)

    def _flat(self) -> Tensor:
        totals = [counter.total for counter in self._counters.values()]
        return torch.cat([total.to(totals[0].device) for total in totals])

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        sizes = [counter.total.numel() for counter in self._counters.values()]
        return tuple(flat.split(sizes))


def _compile_again() -> None:
    # Dynamo does not guard on hooks. Importing it takes seconds, and without it nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
