"""The experts that are on the compute device: a byte budget, least recently used out first, loads ahead of need."""

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError, KptError
from kpt_moe.routers import Router

#: Number of the experts module, and of the expert in it.
Key = tuple[int, int]
#: Waits for the copies and gives the parameters `[1, ...]` of an expert, by name.
ExpertWeights = Callable[[], Mapping[str, Tensor]]
#: Logits `[tokens, num_experts]` of tokens `[tokens, hidden_size]`.
Gate = Callable[[Tensor], Tensor]

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("I", 1024))
}


def bytes_of(budget: float | str, total: int) -> int:
    """A byte budget as a number: bytes, or a number with a unit (`512MiB`, `1.5 GB`), or a share of a total (`25%`)."""
    plain = isinstance(budget, int | float) and not isinstance(budget, bool) and math.isfinite(budget)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", str(int(budget)) if plain else str(budget))
    unit = match[2].upper() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS) or not float(match[1]):
        raise InputError(
            f"budget must be a positive number of bytes, or a string like '512MiB', '1.5GB' or '25%'; got {budget!r}"
        )
    number = float(match[1])
    return int(number * total / 100) if unit == "%" else int(number * _UNITS[unit])


@dataclass(slots=True)
class LayerStatistics:
    """What became of the experts of one module.

    Attributes:
        hits: experts that were on the device, or on their way to it, when a call that needs them began.
        misses: experts that were not.
        evictions: experts that were dropped to make room.
        bytes_moved: bytes copied from the store to the device, or about to be.
        predicted: experts that the lookahead predicted.
        predicted_right: those of them that the next call needed.
        prefetch: how experts are predicted, or why they are not.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_moved: int = 0
    predicted: int = 0
    predicted_right: int = 0
    prefetch: str = ""

    @property
    def hit_rate(self) -> float:
        """Hits by hits and misses; 0 before the first call."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(slots=True)
class _Entry:
    weights: Future[ExpertWeights]
    call: int


class ExpertCache:
    """Experts on the compute device, at most `budget` bytes of them.

    Room is made by dropping the least recently used experts. One thread at a time may call: the one that has `lock`. It
    may use one expert at a time. `load` brings one expert to the device; of each module there are the bytes of one
    expert, and a name for errors. With `background`, what a call lacks, and what is predicted, is loaded in a thread
    that ends when this is closed.
    """

    def __init__(
        self,
        budget: int,
        load: Callable[[Key], ExpertWeights],
        expert_bytes: Sequence[int],
        names: Sequence[str],
        *,
        background: bool = True,
    ) -> None:
        largest = max(range(len(names)), key=expert_bytes.__getitem__)
        if budget < expert_bytes[largest]:
            raise InputError(
                f"a budget of {budget} bytes holds no expert of {names[largest]!r}: "
                f"give at least {expert_bytes[largest]} bytes"
            )
        self.budget = budget
        self.used = 0
        self.lock = threading.RLock()
        self.statistics = [LayerStatistics() for _ in names]
        self._load = load
        self.expert_bytes = expert_bytes
        self._names = names
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._call = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kpt-moe-offload") if background else None

    def begin(self, needed: Sequence[Key], predicted: Sequence[Key] = ()) -> list[Key]:
        """Open a call that needs some experts: count which are there, and begin to load the others.

        In the background are loaded, as far as that drops nothing which this call needs: what it lacks, and then what
        is predicted for the next. Earlier loads that have not begun, and are not needed, are not done; what failed is
        forgotten, so that it is tried again.

        Returns:
            The experts that are needed, in the order in which to use them: those on the device, or on their way to it,
            come first, since what is loaded for the others could drop them.
        """
        self._call += 1
        for key, entry in list(self._entries.items()):
            if (entry.weights.done() and entry.weights.exception()) or (key not in needed and entry.weights.cancel()):
                self._remove(key, moved=False)
        there = [key for key in needed if key in self._entries]
        missing = [key for key in needed if key not in self._entries]
        for key in there:
            self.statistics[key[0]].hits += 1
            self._entries[key].call = self._call
            self._entries.move_to_end(key)
        for key in missing:
            self.statistics[key[0]].misses += 1
        if self._executor is not None:
            for key in (*missing, *predicted):
                if key not in self._entries and self._make_room(key, keep=self._call):
                    self._enter(key, self._executor.submit(self._load, key))
        return there + missing

    def use(self, key: Key) -> Mapping[str, Tensor]:
        """The parameters of an expert, loaded now if nobody has begun to; they stay until the next use."""
        entry = self._entries.get(key)
        if entry is not None and entry.weights.cancel():  # whose turn has not come
            self._remove(key, moved=False)
            entry = None
        try:
            if entry is None:
                self._make_room(key)
                entry = self._enter(key, Future())
                entry.weights.set_result(self._load(key))
            weights = entry.weights.result()
        except Exception as error:
            self._remove(key, moved=False)
            layer, expert = key
            raise KptError(f"expert {expert} of {self._names[layer]!r} could not be loaded: {error}") from error
        return weights()

    def close(self) -> None:
        """Wait for the load that has begun, end the thread, and drop every expert."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self._entries.clear()
        self.used = 0

    def _enter(self, key: Key, weights: Future[ExpertWeights]) -> _Entry:
        entry = self._entries[key] = _Entry(weights, self._call)
        self.used += self.expert_bytes[key[0]]
        self.statistics[key[0]].bytes_moved += self.expert_bytes[key[0]]
        return entry

    def _make_room(self, key: Key, keep: int | None = None) -> bool:
        """Drop what is needed for an expert; if `keep`, nothing that this call touched, or that is being loaded."""
        room, dropped = self.budget - self.used, []
        for other, entry in self._entries.items():
            if room >= self.expert_bytes[key[0]]:
                break
            if keep is None or (entry.call < keep and entry.weights.done()):
                dropped.append(other)
                room += self.expert_bytes[other[0]]
        if room < self.expert_bytes[key[0]]:
            return False
        for other in dropped:
            begun = not self._entries[other].weights.cancel()
            if begun:
                wait((self._entries[other].weights,))
                self.statistics[other[0]].evictions += 1
            self._remove(other, moved=begun)
        return True

    def _remove(self, key: Key, *, moved: bool) -> None:
        del self._entries[key]
        self.used -= self.expert_bytes[key[0]]
        if not moved:
            self.statistics[key[0]].bytes_moved -= self.expert_bytes[key[0]]


def find_gate(block: nn.Module, num_experts: int, size: int) -> Gate | None:
    """What predicts the choices of a block's router; None if nothing does.

    The block has, as `router` or `gate`, a router of KPT's, or a module with a `weight` `[num_experts, size]`. The size
    is that of the tokens which the experts of the block before get. The router of the next layer, run on the hidden
    states of this one, mostly knows which experts the next layer will want, since a layer changes the residual stream
    little (arXiv:2312.17238). A prediction only moves loads forward in time: results never depend on it.
    """
    router: Any
    for router in (getattr(block, "router", None), getattr(block, "gate", None)):
        if isinstance(router, Router) and (router.num_experts, router.hidden_size) == (num_experts, size):
            return router.logits
        if isinstance(router, nn.Module) and getattr(getattr(router, "weight", 0), "shape", 0) == (num_experts, size):
            return partial(_logits, router)
    return None


def predict(gate: Gate, x: Tensor, top_k: int) -> list[int]:
    """The experts among the `top_k` highest logits of any token, those of most tokens first; waits for the device."""
    logits = gate(x)
    counts = torch.bincount(logits.topk(min(top_k, logits.shape[1])).indices.flatten(), minlength=logits.shape[1])
    ordered = counts.sort(descending=True, stable=True)
    return [expert for count, expert in zip(ordered.values.tolist(), ordered.indices.tolist(), strict=True) if count]


def _logits(router: Any, x: Tensor) -> Tensor:
    return F.linear(x.to(router.weight.dtype), router.weight, getattr(router, "bias", None))
