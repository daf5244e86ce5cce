"""Watch a model run: what every module takes and gives, and which kernels ran in it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import kpt_core
from kpt_moe.rewrites import is_transformers_experts

from .bounds import own_lengths
from .steering import Steer
from .trace import Call


class Observer:
    """Collects the calls of a model's modules that give a floating tensor, while its block is open.

    Args:
        model: what runs.
        steer: what changes the tensors that flow between modules, see `steering`.
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
        self._open: list[tuple[str, str, int, tuple[Tensor, ...]]] = []
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
            self._open.append((path, key, len(self._log), tuple(map(self._copy, tensors))))
            return rebuild(self._steer(key, "inputs", tensors)) if self._steer is not None else None

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            opened, key, start, inputs = self._open.pop()
            while opened != path:  # that one raised, and a module around it caught the error
                opened, key, start, inputs = self._open.pop()
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
            return rebuild(self._steer(key, "outputs", tensors)) if self._steer is not None else None

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
