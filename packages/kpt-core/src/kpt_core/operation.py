"""An op: one operation's contract. Its body is its specification; calling it runs the best kernel."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import registry
from .contract import Call, Op
from .dispatch.call import dispatch, inspect_tensors
from .dispatch.candidates import MOST_FAILURES, candidates_of
from .dispatch.opaque import define_opaque
from .dispatch.settings import effective, scoped
from .entry import entries
from .selection import KernelCount, Selection

P = ParamSpec("P")
R = TypeVar("R")


def _explain(op: Op[..., Any], *args: Any, **kwargs: Any) -> Selection:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = op.bind(*args, **kwargs)
    inspect_tensors(op, call)
    log: list[Selection] = []
    # It runs on fake tensors, and so does what it calls in turn.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = op.Call(*tree_map_only(Tensor, mode.from_tensor, tuple(call[:-2])), (), None)
    with scoped(replace(effective(), log=log, dry=True)), mode:
        dispatch(op, fakes)
    return log[-1]


def _reduce(op: Op[..., Any]) -> Any:
    return _restored, (op.name, op.defined_in)


def _restored(name: str, defined_in: str) -> Op[..., Any]:
    """Return the op of this process, where one is unpickled."""
    if name not in registry.ops():
        __import__(defined_in.partition(":")[0])
    return registry.get_op(name)


def op(
    name: str,
    *,
    check: Callable[[Call], None] | None = None,
    fake: Callable[[Call], Any] | None = None,
    saves: Callable[[Call], tuple[Tensor, ...]] | str | None = None,
    fake_saves: Callable[[Call], tuple[Tensor, ...]] | None = None,
    unread: Iterable[str] = (),
    mutates: Iterable[str] = (),
    random: bool = False,
    optional_results: Mapping[int, str] | None = None,
    flops: Callable[[Call], int] | None = None,
    plain_bytes: Callable[[Call], int] | None = None,
    autocast: Iterable[str] = (),
    size_key: Callable[[Call], tuple[int | str, ...]] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of its reference: plain PyTorch that autograd differentiates, on any device.

    Functions among the settings take a call's record (`kpt_core.Call`), so that the signature stands in the op alone.

    Args:
        name: `family.operation`.
        check: raises `InputError` for wrong arguments, before any kernel sees them.
        fake: gives the results as empty contiguous tensors; without it the reference runs on fake tensors.
        saves: what backward needs beside the arguments: `"results"`, or a function that computes the saved tensors
            from the call in plain PyTorch, annotated with a tuple of as many. Every kernel with a backward saves these.
        fake_saves: gives what `saves` does as empty contiguous tensors, by shapes alone. Without it `saves` runs on
            fake tensors, where code that counts to a size makes a compiler's graph for that size alone.
        unread: parameters whose values no gradient depends on; they are not kept for backward.
        mutates: parameters that a call changes; None may be given for one that is optional. Such an op is not run again
            when a kernel raised. Gradients are of the other arguments; none flows through what is changed.
        random: it draws numbers, from what its parameters `seed` and `offset` say alone.
        optional_results: place of a result that may be None to the bool parameter that asks for it; the result is
            annotated `Tensor | None`.
        flops: gives the floating-point operations of a forward, for `torch.utils.flop_counter`.
        plain_bytes: gives the bytes that the reference takes for a forward, if they can be many: where it has to run
            under torch.func or for a second derivative, a warning says so, once.
        autocast: tensor parameters that `torch.autocast` converts to its dtype; the others keep theirs.
        size_key: gives a tuple of ints and strings: the sizes that decide which kernel is fastest. `kpt tune` keeps one
            result for each, so dimensions that vary are rounded (`kpt_core.policy.next_power_of_two`).
            Without it, one result serves all calls of a device and dtype.

    Raises:
        RegistrationError: the name is malformed or taken, or a setting or an annotation is not what it must be.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(
            name, reference, check=check, fake=fake, saves=saves, fake_saves=fake_saves, unread=tuple(unread),
            mutates=tuple(mutates), random=random, optional_results=optional_results or {}, flops=flops,
            plain_bytes=plain_bytes, autocast=tuple(autocast), size_key=size_key,
        )  # fmt: skip
        entry, made.of_graph, made.run_reference = entries(made)
        # A class of its own, since a call looks for `__call__` there; binding is Python's own, and as quick.
        methods = {"__call__": entry, "candidates": candidates_of, "explain": _explain, "__reduce__": _reduce}
        made.__class__ = type("Op", (Op,), {**methods, "__module__": __name__})
        registry.define(made, define_opaque)
        return made

    return decorate


def explain(op: Op[..., Any] | str, *args: Any, **kwargs: Any) -> Selection:
    """Return what `op(*args, **kwargs)` would run, and why not the others; nothing is computed.

    Raises:
        UnknownNameError: no op has that name.
        InputError: the op refuses the arguments.
        NoKernelError: an explicit choice or strict mode can't be satisfied.
    """
    return (registry.get_op(op) if isinstance(op, str) else op).explain(*args, **kwargs)


def counts() -> tuple[KernelCount, ...]:
    """Return how often each kernel that was called, or the reference, served an op in this process, in all threads.

    Calls in compiled code and in exported programs are counted, but not what a compiler fused, nor backward. `refresh`
    ends quarantine and leaves the counts.
    """
    found = []
    for op in registry.defined_ops():
        off = {each.identity for each in list(op.kernels.values()) if len(each.failures) >= MOST_FAILURES}
        called = (each for each in list(op.counts.values()) if each.calls or each.failures)
        found += [replace(each, quarantined=each.identity in off) for each in called]
    return tuple(found)
