"""A model under change, and the way back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from .measure import device_of


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A module that took another's place.

    Attributes:
        rewrite: name of what made it.
        paths: every path at which the module stood: a module that a model uses twice is replaced at both.
        before: what stood there.
        after: what stands there now.
    """

    rewrite: str
    paths: tuple[str, ...]
    before: nn.Module
    after: nn.Module


class Changes:
    """A model, and what was changed in it, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._done: list[Change] = []
        #: Each module has its own flag: a frozen norm stays in evaluation mode while the rest trains.
        self._training = {module: module.training for module in model.modules()}

    @property
    def paths(self) -> list[str]:
        """Where the model was changed."""
        return [path for change in self._done for path in change.paths]

    def swap(self, rewrite: str, path: str, after: nn.Module) -> None:
        """Put a module wherever the one at `path` stands."""
        before = self.model.get_submodule(path)
        paths = tuple(p for p, m in self.model.named_modules(remove_duplicate=False) if m is before)
        named = dict(before.named_modules())
        for name, module in after.named_modules():
            replaced = named.get(name, before)
            self._training.setdefault(module, self._training.get(replaced, replaced.training))
        change = Change(rewrite, paths, before, after)
        self._put(change, after)
        self._done.append(change)

    def undo(self, path: str, rewrite: str | None = None) -> list[Change]:
        """Take back what a rewrite did (None: what all did) at a path, and the later changes that build on it."""
        gone: list[Change] = []
        for change in self._done:
            first = path in change.paths and rewrite in (None, change.rewrite)
            if first or any(_overlap(p, q) for other in gone for p in other.paths for q in change.paths):
                gone.append(change)
        for change in reversed(gone):
            self._put_back(change)
        self._done = [change for change in self._done if change not in gone]
        return gone

    def revert(self) -> None:
        """Take back everything."""
        for change in reversed(self._done):
            self._put_back(change)
        self._done.clear()

    def show_original(self) -> None:
        """Put every original in its place, until `show_changed`."""
        for change in reversed(self._done):
            self._put(change, change.before)

    def show_changed(self) -> None:
        """Put every replacement in its place."""
        for change in self._done:
            self._put(change, change.after)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside; afterwards every module, replaced or new, has the flag it should have."""
        self.model.eval()
        try:
            yield
        finally:
            self.restore_training()

    def restore_training(self) -> None:
        """Set every module's flag to what it was, a replacement's to that of what it replaced."""
        for module, training in self._training.items():
            module.training = training
        # It would keep alive what was rolled back.
        self._training.clear()

    def _put_back(self, change: Change) -> None:
        """Put an original in its place, in the mode and on the device that its replacement was moved to meanwhile."""
        # Without a change of mode each module inside keeps its own flag.
        if change.before.training is not change.after.training:
            change.before.train(change.after.training)
        place = device_of(change.after)
        if device_of(change.before) != place:
            change.before.to(place)
        self._put(change, change.before)

    def _put(self, change: Change, module: nn.Module) -> None:
        for path in change.paths:
            parent, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, module)


def _overlap(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
