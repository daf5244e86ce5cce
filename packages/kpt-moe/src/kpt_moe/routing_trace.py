"""Record what a model's routers decide, keep it in a file, and make a model decide the same again."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kpt_core import InputError

from ._counting import in_recomputation
from .rewrites import is_transformers_experts
from .routers import Router
from .routing import Routing
from .routing_files import (
    PACKED,
    num_tokens,
    pack_routings,
    read_tensors,
    unpack_routings,
    without_logits,
    write_tensors,
)

FORMAT = "kpt.routing_trace"

#: What modules are wrapped in has its own part in their path, which the model of another program may lack.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
#: Where experts modules of transformers take index and weights, and what they call them.
_TOLD = ((1, ("top_k_index", "router_indices")), (2, ("top_k_weights", "routing_weights")))


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """What each router of a model decided, call by call.

    Attributes:
        calls: the routings by the module's path, in the order of its calls.
    """

    calls: Mapping[str, list[Routing]]

    def loads(self) -> dict[str, Tensor]:
        """`[calls, num_experts]` int64 by path: choices that each expert served, on the routings' device.

        Paths without calls are left out.
        """
        return {
            path: torch.stack([routing.tokens_per_expert() for routing in routings])
            for path, routings in self.calls.items()
            if routings
        }

    def to(self, device: torch.device | str) -> "RoutingTrace":
        """The trace on a device."""
        return RoutingTrace({path: [r.to(device) for r in routings] for path, routings in self.calls.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file that appears whole or not at all.

        The calls of a path are stored as one tensor of each kind, so that thousands of short ones (generation) do not
        cost a header entry each.

        Args:
            path: replaced if it exists; its folder must exist.
        """
        tensors: dict[str, Tensor] = {}
        for number, routings in enumerate(self.calls.values()):
            tensors |= {f"{number}.{name}": tensor for name, tensor in pack_routings(routings).items()}
        write_tensors(path, FORMAT, tensors, {"paths": json.dumps(list(self.calls))})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "RoutingTrace":
        """Read what `save` wrote, on the CPU.

        Raises:
            InputError: there is no such file, or it holds no trace of this version.
        """
        return read_tensors(path, FORMAT, _read_trace)


@contextmanager
def record_routing(
    model: nn.Module, *, device: torch.device | str | None = None, logits: bool = False
) -> Iterator[RoutingTrace]:
    """Record what every router of a model decides while the context lasts.

    These are the modules that are a `Router`, and the experts modules of Hugging Face models, which are told the
    decision. Forward passes that activation checkpointing repeats are not recorded again. What is compiled runs
    uncompiled meanwhile, since compiled code does not run hooks that came later.

    Args:
        model: its modules are hooked until the context is left; it may be a router itself. Of a model that
            DistributedDataParallel wraps give the one inside, so that paths are the same without it.
        device: where to keep the routings; each call then waits for its copy. None leaves them where they are.
        logits: keep the routers' logits too, see `Routing.save` for what they cost. Experts modules have none.

    Yields:
        The trace, which grows with every call. Its routings carry no gradients.

    Raises:
        InputError: the model has no such module.
    """
    modules = _deciding(model, "record_routing")
    trace = RoutingTrace({path: [] for path in modules})

    def keep(path: str, routing: Routing) -> None:
        if not in_recomputation():
            routing = routing.detach() if logits else without_logits(routing.detach())
            # A copy: what goes on with these tensors may write to them.
            trace.calls[path].append(routing.to(device or routing.index.device, copy=True))

    def hook(path: str, module: nn.Module) -> RemovableHandle:
        if isinstance(module, Router):
            return module.register_forward_hook(lambda module, args, routing: keep(path, routing))
        return module.register_forward_pre_hook(
            lambda module, args, kwargs: keep(path, _given(module, args, kwargs)), with_kwargs=True
        )

    with _hooked([hook(path, module) for path, module in modules.items()]):
        yield trace


@contextmanager
def replay_routing(model: nn.Module, trace: RoutingTrace) -> Iterator[None]:
    """Make every router of a model choose what a trace says, call by call, while the context lasts.

    A `Router` takes the recorded choices; their weights are its own and carry gradients (Rollout Routing Replay,
    arXiv:2510.11370). An experts module of a Hugging Face model takes the recorded weights too, since it does not know
    the logits: the gate before it then gets no gradients.

    With activation checkpointing, what backward repeats takes the choices of the forward pass that it repeats. This
    asks for backward to follow its forward before the next forward with as many tokens. What is compiled runs
    uncompiled meanwhile, since compiled code does not run hooks that came later.

    Args:
        model: its modules are hooked until the context is left.
        trace: of the same calls of a model with the same paths; on any device.

    Raises:
        InputError: the trace has a path that the model has not; a call has other tokens or experts than the recorded
            one, or is one more than were recorded; calls are left over at the end; a repeated forward pass could be of
            several calls.
    """
    modules = _deciding(model, "replay_routing")
    for path in trace.calls:
        if path not in modules:
            raise InputError(
                f"replay_routing: the trace has calls of {path!r}, which is no router of {type(model).__name__}; its "
                f"routers are {', '.join(map(repr, modules))}"
            )
    replays = {path: _Replay(path, trace.calls.get(path, [])) for path in modules}

    def hook(module: nn.Module, replay: _Replay) -> RemovableHandle:
        if isinstance(module, Router):
            return module.register_forward_pre_hook(
                lambda module, args, kwargs: _with_replay(module, args, kwargs, replay), with_kwargs=True
            )
        return module.register_forward_pre_hook(
            lambda module, args, kwargs: _with_given(module, args, kwargs, replay), with_kwargs=True
        )

    with _hooked([hook(module, replays[path]) for path, module in modules.items()]):
        yield
    # Not reached while an exception is under way.
    for replay in replays.values():
        replay.require_end()


class _Replay:
    """The recorded calls of one module, one after the other."""

    def __init__(self, path: str, routings: list[Routing]) -> None:
        self.path = path
        self.routings = routings
        self.played = 0
        #: By their tokens, the calls that backward may repeat; and of which tokens it began to.
        self.open: dict[int, list[Routing]] = {}
        self.repeating: set[int] = set()

    def next(self, tokens: int, num_experts: int) -> Routing:
        """The routing of the call that comes now."""
        if in_recomputation():
            return self._repeat(tokens)
        what = f"replay_routing: {self.path!r}, call {self.played + 1}"
        if self.played == len(self.routings):
            raise InputError(f"{what}: only {self.played} calls were recorded; replay the calls that were recorded")
        routing = self.routings[self.played]
        for name, recorded, here in (
            ("tokens", num_tokens(routing), tokens),
            ("experts", routing.num_experts, num_experts),
        ):
            if recorded != here:
                raise InputError(
                    f"{what}: was recorded with {recorded} {name} and has {here} now; replay the batches and the "
                    "model that were recorded"
                )
        self.played += 1
        if tokens in self.repeating:
            self.repeating.remove(tokens)
            self.open[tokens].clear()
        self.open.setdefault(tokens, []).append(routing)
        return routing

    def _repeat(self, tokens: int) -> Routing:
        calls = self.open.get(tokens, [])
        if len(calls) != 1:
            raise InputError(
                f"replay_routing: {self.path!r}: activation checkpointing repeats a call with {tokens} tokens, which "
                f"may be any of {len(calls)} that were replayed; run backward after each forward, inside of the context"
            )
        self.repeating.add(tokens)
        return calls[0]

    def require_end(self) -> None:
        """Raise `InputError` if calls are left over."""
        if self.played < len(self.routings):
            raise InputError(
                f"replay_routing: {self.path!r} was called {self.played} times, and {len(self.routings)} calls were "
                "recorded; replay all of them, or a trace of fewer"
            )


@contextmanager
def _hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    """Eager execution, and the hooks removed in the end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _deciding(model: nn.Module, caller: str) -> dict[str, Any]:
    """Modules that decide, or are told, where tokens go; by their paths without wrappers."""
    modules = {
        ".".join(part for part in path.split(".") if part not in _WRAPPERS): module
        for path, module in model.named_modules()
        if isinstance(module, Router) or is_transformers_experts(module)
    }
    if not modules:
        raise InputError(
            f"{caller}: {type(model).__name__} has neither a kpt_moe.Router nor an experts module of transformers"
        )
    return modules


def _with_replay(
    router: Router, args: tuple[Any, ...], kwargs: dict[str, Any], replay: _Replay
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x: Tensor = args[0] if args else kwargs["x"]
    routing = replay.next(x.shape[0], router.num_experts)
    return args, {**kwargs, "replay": routing.to(x.device)}


def _given(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routing:
    """The routing that an experts module is told."""
    index, weights = (
        args[position] if position < len(args) else kwargs[_name(kwargs, names)] for position, names in _TOLD
    )
    return Routing(index.long(), weights, weights.new_empty(0, module.num_experts))


def _with_given(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], replay: _Replay
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    told = _given(module, args, kwargs)
    routing = replay.next(told.index.shape[0], told.num_experts)
    index, weights = routing.index.to(told.index.device), routing.weights.to(told.weights)
    for (position, names), recorded in zip(_TOLD, (index, weights), strict=True):
        if position < len(args):
            args = (*args[:position], recorded, *args[position + 1 :])
        else:
            kwargs = {**kwargs, _name(kwargs, names): recorded}
    return args, kwargs


def _name(kwargs: dict[str, Any], names: tuple[str, ...]) -> str:
    return next(name for name in names if name in kwargs)


def _read_trace(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> RoutingTrace:
    calls = {}
    for number, path in enumerate(json.loads(metadata["paths"])):
        of_path = {name: tensors[f"{number}.{name}"] for name in PACKED if f"{number}.{name}" in tensors}
        calls[path] = unpack_routings(of_path)
    return RoutingTrace(calls)
