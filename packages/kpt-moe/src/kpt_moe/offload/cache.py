"""The experts that are on the compute device: a byte budget, least recently used out first."""

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kpt_core import InputError, KptError

from .transfer import ExpertWeights

#: Number of the experts module, and of the expert in it.
Key = tuple[int, int]

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("I", 1024))
}


def bytes_of(budget: float | str, total: int) -> int:
    """A byte budget as a number.

    Args:
        budget: bytes, or a number with a unit (`512MiB`, `1.5 GB`), or a share of `total` (`25%`).
        total: bytes of all experts.

    Raises:
        InputError: it is neither, or not positive.
    """
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
        bytes_moved: bytes copied from the store to the device.
        loaded_ahead: loads begun because of a prediction, before any call needed them.
        loaded_ahead_used: those of them that a call then needed.
        predicted: experts that the lookahead predicted.
        predicted_right: those of them that the next call needed.
        prefetch: how experts are predicted, or why they are not.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_moved: int = 0
    loaded_ahead: int = 0
    loaded_ahead_used: int = 0
    predicted: int = 0
    predicted_right: int = 0
    prefetch: str = ""

    @property
    def hit_rate(self) -> float:
        """Hits by hits and misses; 0 before the first call."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(slots=True)
class _Entry:
    nbytes: int
    stamp: int
    ahead: bool = False
    pins: int = 0
    weights: ExpertWeights | None = None  # None while it is being loaded


class ExpertCache:
    """Experts on the compute device, at most `budget` bytes of them; safe to use from several threads.

    Room is made by dropping the least recently used experts that nobody uses just now. A thread that finds all of them
    in use waits; since none waits while it holds one (see `use`), room comes.

    Args:
        budget: bytes.
        load: brings one expert to the device; called without the lock, so that loads overlap.
        expert_bytes: bytes of an expert of each module.
        names: of the modules, for errors.

    Raises:
        InputError: the budget is smaller than one expert.
    """

    def __init__(
        self, budget: int, load: Callable[[Key], ExpertWeights], expert_bytes: Sequence[int], names: Sequence[str]
    ) -> None:
        largest = max(range(len(names)), key=expert_bytes.__getitem__)
        if budget < expert_bytes[largest]:
            raise InputError(
                f"a budget of {budget} bytes holds no expert of {names[largest]!r}: "
                f"give at least {expert_bytes[largest]} bytes"
            )
        self.budget = budget
        self.used = 0
        self.statistics = [LayerStatistics() for _ in names]
        self._load = load
        self._expert_bytes = expert_bytes
        self._names = names
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._failures: dict[Key, KptError] = {}
        self._clock = 0
        self._changed = threading.Condition()

    def begin(self, keys: Iterable[Key]) -> tuple[int, list[bool]]:
        """Open a call that needs these experts, and count which are there.

        Returns:
            The number of the call, and of each expert whether it is on the device or on its way to it.

        Raises:
            KptError: an expert could not be loaded ahead, since the last call.
        """
        with self._changed:
            self._raise_failure(next(iter(self._failures), None))
            self._clock += 1
            there = []
            for key in keys:
                entry, count = self._entries.get(key), self.statistics[key[0]]
                there.append(entry is not None)
                if entry is None:
                    count.misses += 1
                else:
                    count.hits += 1
                    count.loaded_ahead_used += entry.ahead
                    entry.ahead = False
                    self._touch(key, entry)
            return self._clock, there

    @contextmanager
    def use(self, key: Key) -> Iterator[ExpertWeights]:
        """Hold an expert on the device, loaded if it is not there. A thread may hold one at a time.

        Raises:
            KptError: the expert could not be loaded; the cache goes on.
        """
        entry = self._acquire(key)
        try:
            assert entry.weights is not None
            yield entry.weights
        finally:
            with self._changed:
                entry.pins -= 1
                self._changed.notify_all()

    def load_ahead(self, key: Key, call: int, predicted: bool) -> None:
        """Load an expert that may be needed soon, if that costs no expert which a call since `call` has touched.

        A failure is raised by the next `begin`, or by `use` of this expert.
        """
        with self._changed:
            if key in self._entries or not self._make_room(self._expert_bytes[key[0]], before=call):
                return
            entry = self._reserve(key)
            entry.ahead = predicted
            self.statistics[key[0]].loaded_ahead += predicted
        try:
            self._fill(key, entry)
        except KptError as error:
            with self._changed:
                self._failures[key] = error
                self._changed.notify_all()

    def clear(self) -> None:
        """Drop every expert that nobody uses."""
        with self._changed:
            for key in [key for key, entry in self._entries.items() if self._idle(entry)]:
                self._remove(key)

    def _acquire(self, key: Key) -> _Entry:
        with self._changed:
            while True:
                self._raise_failure(key)
                entry = self._entries.get(key)
                if entry is not None and entry.weights is not None:
                    entry.pins += 1
                    self._touch(key, entry)
                    return entry
                if entry is None and self._make_room(self._expert_bytes[key[0]]):
                    entry = self._reserve(key)
                    entry.pins = 1
                    break
                self._changed.wait()
        self._fill(key, entry)
        return entry

    def _fill(self, key: Key, entry: _Entry) -> None:
        layer, expert = key
        try:
            weights = self._load(key)
        except BaseException as error:
            with self._changed:
                self._remove(key)
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            raise KptError(f"expert {expert} of {self._names[layer]!r} could not be loaded: {error}") from error
        with self._changed:
            entry.weights = weights
            self.statistics[layer].bytes_moved += entry.nbytes
            self._changed.notify_all()

    def _reserve(self, key: Key) -> _Entry:
        entry = self._entries[key] = _Entry(self._expert_bytes[key[0]], self._clock)
        self.used += entry.nbytes
        return entry

    def _make_room(self, nbytes: int, before: int | None = None) -> bool:
        """Drop what is needed for `nbytes`, of what no call since `before` has touched; if not enough, nothing."""
        room, dropped = self.budget - self.used, []
        for key, entry in self._entries.items():
            if room >= nbytes:
                break
            if self._idle(entry) and (before is None or entry.stamp < before):
                dropped.append(key)
                room += entry.nbytes
        if room < nbytes:
            return False
        for key in dropped:
            self._remove(key)
            self.statistics[key[0]].evictions += 1
        return True

    def _touch(self, key: Key, entry: _Entry) -> None:
        entry.stamp = self._clock
        self._entries.move_to_end(key)

    def _remove(self, key: Key) -> None:
        self.used -= self._entries.pop(key).nbytes

    def _raise_failure(self, key: Key | None) -> None:
        if key is not None and key in self._failures:
            raise self._failures.pop(key)

    @staticmethod
    def _idle(entry: _Entry) -> bool:
        return entry.pins == 0 and entry.weights is not None
