"""Record what a model's routers decide, keep it in a file, and make a model decide the same again."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kpt_core import InputError

from ._counting import deciding_modules
from ._recomputation import in_recomputation
from ._tensor_files import appearing, open_tensors
from .hf_modules import replace_routing, told_routing
from .routers import Router
from .routing import PARTS, SCORES, Routing

_HEADER = {"format": "kpt.routing", "version": "1"}
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """What each router of a model decided, call by call.

    Attributes:
        calls: the routings by the module's path, in the order of its calls.
    """

    calls: Mapping[str, list[Routing]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, without gradients, to a safetensors file that appears whole or not at all.

        The `n`th module's calls are stored in one flat tensor for each part of a routing, `n.index`, `n.weights` and so
        on, so that thousands of short calls (generation) do not cost a header entry each. A row of `n.sizes` tells of
        each call: rows, choices per row, rows of logits, experts, length of the mask (-1: none), 1 if experts chose
        tokens, the place of the score in `SCORES`. Ids take as few bytes as they fit in. The metadata has the modules'
        paths, as JSON. Waits for the routings' device.

        Args:
            path: replaced if it exists; its folder must exist.
        """
        from safetensors.torch import save

        modules = enumerate(self.calls.values())
        tensors = {f"{n}.{name}": part for n, calls in modules for name, part in _packed(calls).items()}
        data = save(tensors, {**_HEADER, "paths": json.dumps(list(self.calls))})
        with appearing(path) as temporary:
            # Not safetensors' `save_file`: its files are for their owner only, whatever the umask says.
            temporary.write_bytes(data)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "RoutingTrace":
        """Read what `save` wrote, on the CPU.

        Raises:
            InputError: there is no such file, or it is damaged or of another format or version.
        """
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            found = {name: metadata.get(name) for name in _HEADER}
            if found != _HEADER:
                raise InputError(f"{path} must be of {_HEADER}; got {found}: read it with what wrote it")
            # Copies: the file's own pages would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  it is no mapping
        try:
            return RoutingTrace({name: _unpacked(tensors, n) for n, name in enumerate(json.loads(metadata["paths"]))})
        except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{path}: is damaged ({error}): write it again") from error


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
        logits: keep the routers' logits too: `num_experts` numbers per token, where a choice is `top_k` small ones.
            Experts modules have none.

    Yields:
        The trace, which grows with every call. Its routings carry no gradients.

    Raises:
        InputError: the model has no such module.
    """
    modules = deciding_modules(model, "record_routing")
    trace = RoutingTrace({path: [] for path in modules})

    def keep(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if in_recomputation():
            return
        if not isinstance(module, Router):
            index, weights = told_routing(args, kwargs)
            out = Routing(index.long(), weights, weights.new_empty(0, module.num_experts))
        routing = out.detach() if logits else out.detach().without_logits()
        # A copy: what goes on with these tensors may write to them.
        trace.calls[path].append(routing.to(device or routing.index.device, copy=True))

    with _hooked([m.register_forward_hook(partial(keep, path), with_kwargs=True) for path, m in modules.items()]):
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
    modules = deciding_modules(model, "replay_routing")
    for path in trace.calls:
        if path not in modules:
            raise InputError(
                f"replay_routing: the trace has calls of {path!r}, which is no router of {type(model).__name__}; its "
                f"routers are {', '.join(map(repr, modules))}"
            )
    replays = {path: _Replay(path, trace.calls.get(path, [])) for path in modules}
    with _hooked([m.register_forward_pre_hook(replays[path], with_kwargs=True) for path, m in modules.items()]):
        yield
    # Not reached while an exception is under way.
    for path, replay in replays.items():
        if replay.played < len(replay.routings):
            raise InputError(
                f"replay_routing: {path!r} was called {replay.played} times, and {len(replay.routings)} calls were "
                "recorded; replay all of them, or a trace of fewer"
            )


class _Replay:
    """A hook before the calls of one module, which makes it choose as in the recorded calls, one after the other."""

    def __init__(self, path: str, routings: list[Routing]) -> None:
        self.path = path
        self.routings = routings
        self.played = 0
        #: By their tokens, the calls that backward may repeat; and of which tokens it began to.
        self.open: dict[int, list[Routing]] = {}
        self.repeating: set[int] = set()

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, the recorded routing among them."""
        if isinstance(module, Router):
            x: Tensor = args[0] if args else kwargs["x"]
            return args, {**kwargs, "replay": self._next(x.shape[0], module.num_experts).to(x.device)}
        index, weights = told_routing(args, kwargs)
        routing = self._next(index.shape[0], module.num_experts)
        recorded = routing.index.to(index.device), routing.weights.to(weights)
        return replace_routing(args, kwargs, recorded)

    def _next(self, tokens: int, num_experts: int) -> Routing:
        if in_recomputation():
            return self._repeat(tokens)
        what = f"replay_routing: {self.path!r}, call {self.played + 1}"
        if self.played == len(self.routings):
            raise InputError(f"{what}: only {self.played} calls were recorded; replay the calls that were recorded")
        routing = self.routings[self.played]
        if (routing.num_tokens, routing.num_experts) != (tokens, num_experts):
            raise InputError(
                f"{what}: was recorded with {routing.num_tokens} tokens and {routing.num_experts} experts, and has "
                f"{tokens} and {num_experts} now; replay the batches and the model that were recorded"
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


@contextmanager
def _hooked(handles: list[RemovableHandle]) -> Iterator[None]:
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _packed(routings: Sequence[Routing]) -> dict[str, Tensor]:
    sizes = []
    for r in routings:
        masked = -1 if r.mask is None else len(r.mask)
        sizes.append([*r.index.shape, *r.logits.shape, masked, int(r.token is not None), SCORES.index(r.score)])
    packed = {"sizes": torch.tensor(sizes, dtype=torch.int64, device="cpu").view(-1, 7)}
    for name in PARTS:
        parts = [part.detach().reshape(-1).cpu() for r in routings if (part := getattr(r, name)) is not None]
        if parts:
            whole = torch.cat(parts)
            fitting = (whole.to(dtype) for dtype in _INTEGERS if torch.equal(whole.to(dtype).long(), whole))
            packed[name] = next(fitting) if name in ("index", "token") else whole
    return packed


def _unpacked(tensors: Mapping[str, Tensor], number: int) -> list[Routing]:
    """The routings of a module; raises KeyError, TypeError, ValueError or RuntimeError where parts don't fit."""
    at = dict.fromkeys(PARTS, 0)

    def take(name: str, *shape: int) -> Tensor:
        start, at[name] = at[name], at[name] + torch.Size(shape).numel()
        return tensors[f"{number}.{name}"][start : at[name]].view(shape)

    routings = []
    for rows, top_k, tokens, num_experts, masked, by_token, score in tensors[f"{number}.sizes"].tolist():
        routing = Routing(
            take("index", rows, top_k).long(),
            take("weights", rows, top_k),
            take("logits", tokens, num_experts),
            take("mask", masked) if masked >= 0 else None,
            take("token", rows).long() if by_token else None,
            SCORES[score],
        )
        token, mask, routed = routing.token, routing.mask, routing.num_tokens
        fits = routing.weights.is_floating_point() and num_experts > 0 and tokens in (0, routed)
        fits &= mask is None or (mask.dtype is torch.bool and masked == routed)
        if not fits or (token is not None and not bool(((token >= 0) & (token < routed)).all())):
            raise ValueError("its tensors do not fit together")
        routings.append(routing)
    if any(len(tensors.get(f"{number}.{name}", ())) != end for name, end in at.items()):
        raise ValueError("its sizes do not add up")
    return routings
