"""Run a model, as it is or in float64: watch what every module takes and gives, and change what flows between them."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

import kpt_core
from kpt_cli.errors import CliError
from kpt_moe.rewrites import is_transformers_experts
from kpt_optimize.judging import Call, differing_rows, find_routing, own_lengths

from .models import Arm, users_code

#: Told what goes on, and how much of how much is done; the whole is None where nobody knows.
Tell = Callable[[int, int | None, str], None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  #: positional and keyword arguments
Side = Literal["inputs", "outputs"]
#: From a call's key and the tensors that its module is about to take, or gave, to those that take their place.
Steer = Callable[[str, Side, list[Tensor]], list[Tensor]]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def observe(
    model: nn.Module,
    given: Arguments,
    arm: Arm,
    what: str,
    tell: Tell,
    *,
    steer: Steer | None = None,
    backward: bool = False,
) -> dict[str, Call]:
    """Run a model, and return the calls of modules that gave a floating tensor, by their keys, as they ended.

    It runs on copies of what it is given, since it may write into them. `steer` changes the tensors that flow between
    modules; `backward` backpropagates a sum of the elements of the first differentiable output, with fixed signs.
    `CliError` says that the model does not run, or that nothing in its output needs a gradient.
    """
    calls: dict[str, Call] = {}
    begun: list[tuple[str, str, int, tuple[Tensor, ...]]] = []
    counts: Counter[str] = Counter()
    #: Copies on the CPU, with the original's version: what one module gives, the next one takes.
    copies: Any = WeakTensorKeyDictionary()

    def copied(tensor: Tensor) -> Tensor:
        if tensor not in copies or copies[tensor][0] != tensor._version:
            copies[tensor] = tensor._version, tensor.detach().to("cpu", copy=True).contiguous()
        known: Tensor = copies[tensor][1]
        return known

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        counts[path] += 1
        key = path if counts[path] == 1 else f"{path}#{counts[path]}"
        tensors, rebuild = _tensors((args, kwargs))
        begun.append((path, key, len(log), tuple(map(copied, tensors))))
        return rebuild(steer(key, "inputs", tensors)) if steer is not None else None

    def after(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        opened, key, start, inputs = begun.pop()
        while opened != path:  # that one raised, and a module around it caught the error
            opened, key, start, inputs = begun.pop()
        tensors, rebuild = _tensors(output)
        if any(tensor.is_floating_point() for tensor in tensors):
            calls[key] = Call(
                key=key,
                type=type(module).__name__,
                inputs=inputs,
                outputs=tuple(map(copied, tensors)),
                kernels=_names(log[start:]),
                lengths=own_lengths(module, tensors),
            )
            tell(len(calls), None, f"{what}: {key or type(module).__name__}")
        return rebuild(steer(key, "outputs", tensors)) if steer is not None else None

    # Each implementation of experts calls what is inside of them in its own way, or not at all.
    experts = filter(is_transformers_experts, model.modules())
    inside = {part for module in experts for part in module.modules() if part is not module}
    with ExitStack() as stack:
        stack.enter_context(arm.running(model))
        stack.enter_context(torch.set_grad_enabled(backward))
        log = stack.enter_context(kpt_core.record())
        for path, module in model.named_modules():
            if module not in inside:
                hook = module.register_forward_pre_hook(partial(before, path), with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(module.register_forward_hook(partial(after, path)).remove)
        stack.enter_context(users_code(f"{type(model).__name__} does not run on the inputs ({what})"))
        args, kwargs = placed(given, device_of(model))
        output = model(*args, **kwargs)
        if backward:
            _backpropagate(model, output)
    if not calls:
        raise CliError(f"{type(model).__name__} gives no floating tensor, nor does any module in it")
    return calls


def _backpropagate(model: nn.Module, output: Any) -> None:
    leaf = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad), None)
    if leaf is None:
        name = type(model).__name__
        raise CliError(f"the output of {name} has no gradient; leave --backward out, or unfreeze its parameters")
    leaf.backward(signs(leaf.numel()).view(leaf.shape).to(leaf.device, leaf.dtype))


def signs(count: int, seed: int = 0) -> Tensor:
    """Return `count` numbers 1 or -1, float64, the same on every machine and in every version."""
    x = torch.arange(count, dtype=torch.int64) + seed * 0x9E3779B9
    # The finaliser of MurmurHash3 in 32 bits; int64 holds its products modulo 2**64, whose low half is all that counts.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (((x ^ (x >> shift)) & 0xFFFFFFFF) * factor) & 0xFFFFFFFF
    return 1.0 - 2.0 * (x & 1).double()


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's first parameter is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def placed(given: Arguments, device: torch.device | str, dtype: torch.dtype | None = None) -> Arguments:
    """Return copies of arguments on a device, floating ones in a dtype if one is given."""

    def copied(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, wanted, copy=True)

    made: Arguments = tree_map_only(Tensor, copied, given)
    return made


def _tensors(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the real tensors of a tree, and what puts others in their place."""
    leaves, spec = tree_flatten(tree)
    places = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_complex()}

    def rebuild(tensors: list[Tensor]) -> Any:
        others = dict(zip(places, tensors, strict=True))
        return tree_unflatten([others.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return list(places.values()), rebuild


def _names(selections: Sequence[kpt_core.Selection]) -> tuple[str, ...]:
    """Return `op: kernel` of every selection and of those that it led to, each once."""
    found: dict[str, None] = {}
    for selection in selections:
        found |= dict.fromkeys((f"{selection.op}: {selection.kernel}", *_names(selection.children)))
    return tuple(found)


def following(recorded: Mapping[str, Call]) -> Steer:
    """Give tokens whose routing flipped the recorder's experts and weights, so that all after it can be compared.

    A routing is corrected among arguments too, where the router is no module of its own. Tokens whose routing by the
    recorder differs from float64 follow though their choice is the same here: the recorder's weights are others.
    """

    def steer(key: str, side: Side, leaves: list[Tensor]) -> list[Tensor]:
        theirs, routing = _recorded(recorded, key, side, leaves), find_routing(leaves)
        if theirs is None or routing is None:
            return leaves
        rows = differing_rows(leaves[routing.experts].cpu(), theirs[routing.experts])
        if side == "outputs" and recorded[key].reference:
            rows = rows | differing_rows(theirs[routing.experts], recorded[key].reference[routing.experts])
        for position in routing.chosen if rows.any() else ():
            leaf = leaves[position]
            leaves[position] = torch.where(rows[:, None].to(leaf.device), _as(theirs[position], leaf), leaf)
        return leaves

    return steer


def forcing(recorded: Mapping[str, Call]) -> Steer:
    """Feed every module what the recorder's was fed, and hand on what that gave: no error goes any further."""

    def steer(key: str, side: Side, leaves: list[Tensor]) -> list[Tensor]:
        theirs = _recorded(recorded, key, side, leaves)
        return [
            # A mask may be boolean for one implementation and additive for another.
            _as(value, leaf) if value.is_floating_point() == leaf.is_floating_point() else leaf
            for value, leaf in zip(leaves if theirs is None else theirs, leaves, strict=True)
        ]

    return steer


def _recorded(
    recorded: Mapping[str, Call], key: str, side: Side, leaves: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """Return what the recorder has in the place of some tensors, if it has the same number of the same shapes."""
    theirs: tuple[Tensor, ...] = getattr(recorded.get(key), side, ())
    return theirs if [x.shape for x in theirs] == [x.shape for x in leaves] else None


def _as(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy, since a module may write into what it is given."""
    return value.to(like.device, like.dtype, copy=True)


def widened(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the CPU with its weights and buffers in float64, each exactly what it was."""
    # Copied one by one: a narrow copy of all beside the wide one, and on the model's device, might not fit.
    widen: dict[int, Any] = {id(p): nn.Parameter(_wide(p), p.requires_grad) for p in model.parameters()}
    wide: Any = copy.deepcopy(model, widen | {id(b): _wide(b) for b in model.buffers()})
    if getattr(getattr(wide, "config", None), "_attn_implementation", None) not in (None, "eager", "sdpa"):
        wide.set_attn_implementation("eager")  # others can't run in float64 on any machine
    return wide  # type: ignore[no-any-return]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


class _Widen(TorchFunctionMode):
    """Turn every conversion to a narrower floating dtype into one to float64.

    Models convert to float32 inside, in norms and routers for instance. That is wide beside bfloat16; in a float64 run
    it would make the oracle as coarse as what it judges.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args, kwargs = tree_map_only(
            torch.dtype, lambda dtype: torch.float64 if dtype in _NARROW else dtype, (tuple(args), kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute everything in float64 inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)
