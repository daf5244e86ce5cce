"""Watch a model run: what every module takes and gives, and which kernels ran in it; and steer it by a recording."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import kpt_core
from kpt_moe.rewrites import is_transformers_experts

from .bounds import own_lengths
from .routing import differing_rows, find_routing


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of one module, in the order in which calls end.

    Attributes:
        key: the module's path, with `#2` and so on for further calls of it.
        type: name of its class.
        inputs: the tensors among its arguments, in order, on the CPU.
        outputs: the tensors that it gave, before any steering.
        kernels: what served KPT's ops in it, as `op: kernel`.
        lengths: over how many terms its own sums go, see `own_lengths`.
    """

    key: str
    type: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kernels: tuple[str, ...]
    lengths: tuple[int, ...]


class Steer(Protocol):
    """Changes what flows between the modules of a model that runs; both methods get tensors and give as many."""

    def before(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """What the module shall take."""

    def after(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """What the module's callers shall get from it."""


#: What a recorder's calls took and gave: key of the call to its tensors.
Recorded = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Follow:
    """Give tokens whose routing flipped the recorder's experts and weights, so that all after it can be compared.

    Attributes:
        inputs: what the recorder's calls took.
        outputs: what they gave.
        also: for a call's key and side, tokens that follow though their choice is the same here: those where the
            recorder differs from float64, whose weights are the recorder's there too.
    """

    inputs: Recorded
    outputs: Recorded
    also: dict[tuple[str, str], Tensor]

    def before(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """Correct a routing among the arguments, where the router is no module of its own."""
        return self._followed(leaves, self.inputs.get(key), self.also.get((key, "inputs")))

    def after(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """Correct a router's choice."""
        return self._followed(leaves, self.outputs.get(key), self.also.get((key, "outputs")))

    @staticmethod
    def _followed(leaves: list[Tensor], recorded: Sequence[Tensor] | None, also: Tensor | None) -> list[Tensor]:
        routing = find_routing(leaves)
        if routing is None or not _same_shapes(leaves, recorded):
            return leaves
        assert recorded is not None
        rows = differing_rows(leaves[routing.index].cpu(), recorded[routing.index])
        rows = rows if also is None else rows | also
        if rows.any():
            for position in (routing.index, *routing.weights):
                leaf = leaves[position]
                leaves[position] = torch.where(rows[:, None].to(leaf.device), _as(recorded[position], leaf), leaf)
        return leaves


@dataclass(frozen=True)
class Force:
    """Feed every module what the recorder's module was fed, and hand on what it gave: no error goes any further."""

    inputs: Recorded
    outputs: Recorded

    def before(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """The recorder's arguments."""
        return self._forced(leaves, self.inputs.get(key))

    def after(self, key: str, leaves: list[Tensor]) -> list[Tensor]:
        """The recorder's results."""
        return self._forced(leaves, self.outputs.get(key))

    @staticmethod
    def _forced(leaves: list[Tensor], recorded: Sequence[Tensor] | None) -> list[Tensor]:
        if not _same_shapes(leaves, recorded):
            return leaves
        assert recorded is not None
        return [
            # A mask may be boolean for one implementation and additive for another.
            _as(value, leaf) if value.is_floating_point() == leaf.is_floating_point() else leaf
            for value, leaf in zip(recorded, leaves, strict=True)
        ]


def _same_shapes(leaves: Sequence[Tensor], recorded: Sequence[Tensor] | None) -> bool:
    return recorded is not None and [leaf.shape for leaf in leaves] == [value.shape for value in recorded]


def _as(value: Tensor, like: Tensor) -> Tensor:
    """A copy, since a module may write into what it is given."""
    return value.to(like.device, like.dtype, copy=True)


class Observer:
    """Collects the calls of a model's modules that give a floating tensor, while its block is open.

    Args:
        model: what runs.
        steer: changes what flows between the modules.
        on_call: told the key of each call when it ends.
    """

    def __init__(
        self, model: nn.Module, steer: Steer | None = None, on_call: Callable[[str], None] | None = None
    ) -> None:
        self.calls: list[Call] = []
        self._model = model
        self._steer = steer
        self._on_call = on_call
        self._stack = ExitStack()
        self._open: list[tuple[str, int, tuple[Tensor, ...]]] = []
        self._counts: dict[str, int] = {}
        #: Copies on the CPU by the tensor's identity and version: what one module gives, the next one takes.
        self._copies: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._log: list[kpt_core.Selection] = []

    def __enter__(self) -> "Observer":
        self._log = self._stack.enter_context(kpt_core.record())
        for path, module in _comparable(self._model):
            before, after = self._hooks(path)
            self._stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._stack.callback(module.register_forward_hook(after).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._copies.clear()

    def _hooks(self, path: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._counts[path] = number = self._counts.get(path, 0) + 1
            key = path if number == 1 else f"{path}#{number}"
            tensors, rebuild = _tensors((args, kwargs))
            self._open.append((key, len(self._log), tuple(map(self._copy, tensors))))
            return rebuild(self._steer.before(key, tensors)) if self._steer is not None else None

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            key, start, inputs = self._open.pop()
            tensors, rebuild = _tensors(output)
            if any(tensor.is_floating_point() for tensor in tensors):
                call = Call(
                    key=key,
                    type=type(module).__name__,
                    inputs=inputs,
                    outputs=tuple(map(self._copy, tensors)),
                    kernels=_names(self._log[start:]),
                    lengths=own_lengths(module, tensors),
                )
                self.calls.append(call)
                if self._on_call is not None:
                    self._on_call(key)
            return rebuild(self._steer.after(key, tensors)) if self._steer is not None else None

        return before, after

    def _copy(self, tensor: Tensor) -> Tensor:
        identity = (id(tensor), tensor._version)
        known = self._copies.get(identity)
        if known is None or known[0]() is not tensor:  # another tensor may have got a dead one's id
            known = ref(tensor), tensor.detach().to("cpu", copy=True).contiguous()
            self._copies[identity] = known
        return known[1]


def _comparable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but those inside of experts, which each implementation calls in its own way, or not at all."""
    inside = {
        id(part)
        for module in model.modules()
        if is_transformers_experts(module)
        for part in module.modules()
        if part is not module
    }
    return [(path, module) for path, module in model.named_modules() if id(module) not in inside]


def _tensors(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The real tensors of a tree, and what puts others in their place."""
    leaves, spec = tree_flatten(tree)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_complex()]

    def rebuild(tensors: list[Tensor]) -> Any:
        replaced = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            replaced[position] = tensor
        return tree_unflatten(replaced, spec)

    return [leaves[i] for i in positions], rebuild


def _names(selections: Sequence[kpt_core.Selection]) -> tuple[str, ...]:
    """`op: kernel` of every selection and of those that it led to, each once."""
    found: dict[str, None] = {}
    for selection in selections:
        found[f"{selection.op}: {selection.kernel}"] = None
        found.update(dict.fromkeys(_names(selection.children)))
    return tuple(found)
