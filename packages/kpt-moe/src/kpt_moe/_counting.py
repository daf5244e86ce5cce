"""Counts of what routers decide, kept on their device and read nowhere on the host."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from kpt_core import InputError

from ._recomputation import in_recomputation
from .hf_modules import is_transformers_experts, told_routing
from .routers import Router
from .routing import Routing

#: What modules are wrapped in has its own part in their path, which the model of another program may lack.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

_library = torch.library.Library("kpt_moe", "FRAGMENT")
_library.define("accumulate(Tensor(a!) total, Tensor counts) -> ()")


def deciding_modules(model: nn.Module, caller: str) -> dict[str, Any]:
    """Return the modules that decide where tokens go, or are told it; by their paths without wrappers.

    Raises:
        InputError: the model has no such module.
    """
    modules = {
        ".".join(part for part in path.split(".") if part not in _WRAPPERS): module
        for path, module in model.named_modules()
        if isinstance(module, Router) or is_transformers_experts(module)
    }
    if not modules:
        raise InputError(
            f"{caller}: {type(model).__name__} has neither a kpt_moe.routers.Router nor an experts module of "
            "transformers"
        )
    return modules


# An op, since a compiled forward inside of a checkpointed region must ask this when it runs, not when it is traced.
@torch.library.impl(_library, "accumulate", "CompositeExplicitAutograd")
def _accumulate(total: Tensor, counts: Tensor) -> None:
    if not in_recomputation():
        total.add_(counts)


@torch.library.register_fake("kpt_moe::accumulate", lib=_library)  # type: ignore[untyped-decorator]
def _accumulate_fake(total: Tensor, counts: Tensor) -> None:
    return None


class Counter:
    """A forward hook that counts what a router decides, or what experts of transformers are told.

    It is pickled and copied with its module.

    `total` is int64: load and asked of each expert, dropped, tokens. It is no buffer: DistributedDataParallel would
    give every rank the first one's. It follows the tokens.
    """

    def __init__(self, router: Any, training_only: bool) -> None:
        device = next((tensor.device for tensor in router.parameters()), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        self.total = torch.zeros(2 * router.num_experts + 2, dtype=torch.int64, device=device)
        self.training_only = training_only

    def __call__(self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.training_only and not router.training:
            return
        if isinstance(out, Routing):
            numbers = torch.stack((out.dropped(), out.counted_tokens()))
            counts = torch.cat((out.tokens_per_expert(), out.asked_per_expert(), numbers))
        else:
            index, weights = told_routing(args, kwargs)
            told = Routing(index, weights, weights.new_empty(0, router.num_experts))
            # These experts refuse nothing: half as many small kernels as above, in each layer of a served model.
            asked = told.tokens_per_expert()
            counts = torch.cat((asked, asked, asked.new_zeros(1), asked.new_full((1,), told.num_tokens)))
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

    def __init__(self, routers: Mapping[str, Any], *, training_only: bool) -> None:
        self._routers = dict(routers)
        self._counters = {path: Counter(router, training_only) for path, router in routers.items()}
        self._handles = [routers[path].register_forward_hook(c, with_kwargs=True) for path, c in self._counters.items()]
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
