"""Loading experts before they are needed.

The router of the next layer, run on the hidden states of this one, mostly knows which experts the next layer will want,
since a layer changes the residual stream little (Eliseev and Mazur, "Fast Inference of Mixture-of-Experts Language
Models with Offloading", arXiv:2312.17238; Pre-gated MoE, arXiv:2308.12066, trains for it). A prediction only moves
loads forward in time: results never depend on it.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe.routers import Router

from .cache import ExpertCache, Key

#: Logits `[tokens, num_experts]` of tokens `[tokens, hidden_size]`.
Gate = Callable[[Tensor], Tensor]


def find_gate(block: nn.Module, num_experts: int, size_before: int, size: int) -> Gate | str:
    """What predicts the choices of a block's router, or a sentence that says why nothing does.

    Args:
        block: the module that holds the experts and, as `router` or `gate`, their router: one of KPT's, or a module
            with a `weight` `[num_experts, hidden_size]`.
        num_experts: number of experts.
        size_before: size of the tokens that the experts of the block before get.
        size: size of the tokens that these experts get.
    """
    for name in ("router", "gate") if size_before == size else ():
        router = getattr(block, name, None)
        if isinstance(router, Router) and (router.num_experts, router.hidden_size) == (num_experts, size):
            return functools.partial(_of_router, router)
        if isinstance(router, nn.Module) and getattr(getattr(router, "weight", None), "shape", None) == (
            num_experts,
            size,
        ):
            return functools.partial(_of_weight, router)
    return (
        f"no prefetch: {type(block).__name__} has neither a router of KPT's nor a gate with a weight "
        f"[{num_experts}, {size_before}], for tokens of the block before"
    )


def predict(gate: Gate, x: Tensor, top_k: int) -> list[int]:
    """The experts among the `top_k` highest logits of any token, those of most tokens first; waits for the device."""
    logits = gate(x)
    counts = torch.bincount(logits.topk(min(top_k, logits.shape[1])).indices.flatten(), minlength=logits.shape[1])
    ordered = counts.sort(descending=True, stable=True)
    return [expert for count, expert in zip(ordered.values.tolist(), ordered.indices.tolist(), strict=True) if count]


class Prefetcher:
    """Loads experts into a cache in a background thread, which ends when this is closed or forgotten.

    Args:
        cache: where to.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kpt-moe-offload")
        self._queued: dict[Key, Future[None]] = {}

    def request(self, call: int, needed: Iterable[Key], predicted: Iterable[Key]) -> None:
        """Load what a call lacks, then what the next is predicted to need; earlier requests not begun are dropped."""
        queued = self._queued
        self._queued = {}
        for future in queued.values():
            future.cancel()
        for keys, are_predicted in ((needed, False), (predicted, True)):
            for key in keys:
                self._queued[key] = self._executor.submit(self._cache.load_ahead, key, call, are_predicted)

    def withdraw(self, key: Key) -> None:
        """Forget an expert that the caller is about to load itself, unless its load has begun."""
        if (future := self._queued.pop(key, None)) is not None:
            future.cancel()

    def close(self) -> None:
        """Wait for the load that has begun, and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _of_router(router: Router, x: Tensor) -> Tensor:
    return router.gate(x.to(torch.promote_types(x.dtype, torch.float32)))


def _of_weight(router: Any, x: Tensor) -> Tensor:
    return F.linear(x.to(router.weight.dtype), router.weight, getattr(router, "bias", None))
