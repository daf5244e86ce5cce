"""What a call leaves of itself in the process: no setting changed, no memory kept."""

import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kpt_conformance.drawing import drawn_cases
from kpt_conformance.extent import over
from kpt_conformance.interpreter import interpreting
from kpt_conformance.tensors import noted_in, require_addresses, tensors_of
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

from .process import descriptors, modes, state_of, unusual

_CALLS = 4

#: Beyond so many rows or columns a kernel may go another way.
_LARGE = 256


def larger(trial: Trial) -> Iterator[Arguments]:
    """Yield arguments past 256 of each dimension in turn, for a table's first case alone, where no interpreter runs."""
    left = set(trial.table.domain.sizes) if trial.table.domain is not None else set()
    if trial.case is not trial.table.cases[0] or trial.subject.direct:
        return
    for case in drawn_cases(trial.table):
        passed = {name for name in left if case.sizes.get(name, 0) > _LARGE}
        if not passed or case.once is not None:
            continue
        arguments = trial.table.arguments(case, dtype=trial.dtype, device=trial.subject.device)
        if trial.refusal(arguments) is None:
            left -= passed
            yield arguments


def called(trial: Trial, arguments: Arguments) -> None:
    """Call as it is, in no mode that would be put back after it."""
    with trial.subject.chosen():
        trial.outputs(trial.leaves(arguments))


@over()
def process_state(trial: Trial) -> None:
    """Calls leave random generators, rounding, torch's settings and the process alone, whatever the default dtype.

    With gradients, without, under `no_grad` and `inference_mode`; of the first case past 256 of each dimension too.
    """
    arguments = trial.arguments()
    device = trial.subject.device
    with unusual(device):
        _require_unchanged(trial, arguments, state_of(device))
        for others in larger(trial):
            _require_unchanged(trial, others, state_of(device), "with larger arguments ")
        # As in layers that are built in their model's dtype.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            got = trial.run(arguments)
        finally:
            torch.set_default_dtype(default)
    trial.assert_right(arguments, got, "with bfloat16 as the default dtype")


def _require_unchanged(trial: Trial, arguments: Arguments, before: Mapping[str, Any], what: str = "") -> None:
    """Raise `AssertionError` if a call, in whatever mode, changes what was there before, or every call adds to it."""
    plain = trial.forward_only()
    count = {"thread": [threading.active_count()], "open file": [descriptors()]}
    for mode, trained in ((nullcontext, True), (torch.no_grad, False), (torch.inference_mode, False), (None, False)):
        with (mode or nullcontext)(), redirect_stdout(StringIO()) as printed:
            expected = {**before, **modes()}
            if trained:
                trial.run(arguments)
            else:
                called(trial if mode else plain, arguments)
            after = state_of(trial.subject.device)
        where = what + (f"under {mode.__name__} " if not trained and mode else "")
        assert not printed.getvalue(), f"the call {where}printed {printed.getvalue()!r}"
        changed = [name for name in expected if expected[name] != after.get(name)]
        assert not changed, f"the call {where}changed {' and '.join(changed)}"
        for kind, now in (("thread", threading.active_count()), ("open file", descriptors())):
            count[kind].append(now)
    for kind, counts in count.items():
        # A pool may be started by one call, and others' threads end and begin: but not with every call.
        steady = any(later <= earlier for earlier, later in itertools.pairwise(counts))
        assert steady or not counts[0], f"every call {what}leaves one more {kind} behind"


def _watched(kind: str, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, StorageWeakRef]:
    """Weak references to the memory of tensors, by what a message calls them."""
    named = tensors.items() if isinstance(tensors, Mapping) else ((f"tensor {i}", t) for i, t in enumerate(tensors))
    return {f"{kind} {name}": StorageWeakRef(tensor.untyped_storage()) for name, tensor in named if tensor.numel()}


def held_after(
    trial: Trial, arguments: Arguments, mode: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, StorageWeakRef]:
    """Call once with copies of the arguments, and its backward; watches all that goes in, is saved, and comes out."""
    leaves = trial.leaves({name: _copied(value) for name, value in arguments.items()})
    saved: list[Tensor] = []
    pulls: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    with trial.subject.chosen(), torch.set_grad_enabled(trial.differentiable), mode():
        with torch.autograd.graph.saved_tensors_hooks(noted_in(saved), lambda tensor: tensor):
            outputs = trial.outputs(leaves)
        if trial.differentiable and torch.is_grad_enabled():
            found = trial.gradients(leaves, outputs, noted_in(pulls))
            gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    watched = {
        **_watched("argument", tensors_of(leaves)),
        **_watched("", outputs),
        **_watched("saved", saved),
        **_watched("cotangent", pulls),
        **_watched("gradient of", gradients),
    }
    saved.clear()  # the graph holds the hook, which holds them
    return watched


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


#: With gradients if there are any, and as in generation.
MODES: tuple[Callable[[], AbstractContextManager[Any]], ...] = (nullcontext, torch.no_grad, torch.inference_mode)


@over()
def keeps_nothing_alive(trial: Trial) -> None:
    """After a call no memory of its arguments, results, cotangents and gradients is held, and calls don't pile up.

    Under `no_grad` and `inference_mode` neither; of the first case past 256 of each dimension too.
    """
    require_addresses(trial.subject.device)
    arguments = trial.arguments()
    held_after(trial, arguments)
    for mode in MODES:
        _require_released(trial, arguments, mode)
        for others in larger(trial):
            _require_released(trial, others, mode, "with larger arguments ")
    if trial.case is trial.table.cases[0]:
        _require_no_growth(trial, arguments)


def _require_released(
    trial: Trial, arguments: Arguments, mode: Callable[[], AbstractContextManager[Any]], what: str = ""
) -> None:
    """Raise `AssertionError` if a call holds memory after it is over."""
    watched = held_after(trial, arguments, mode)
    if interpreting():
        gc.collect()  # Triton's interpreter makes cycles, and no kernel can help it
    if mode is not nullcontext and not all(reference.expired() for reference in watched.values()):
        watched = held_after(trial, arguments, mode)  # something may be made in the first such call
    alive = [name.strip() for name, reference in watched.items() if not reference.expired()]
    if alive:
        gc.collect()
        cyclic = all(reference.expired() for reference in watched.values())
        until = "until Python looks for cycles" if cyclic else "for good"
        where = what + ("" if mode is nullcontext else f"under {getattr(mode, '__name__', mode)} ")
        raise AssertionError(f"after the call {where}is over, the memory of {', '.join(alive)} is still held, {until}")


def _require_no_growth(trial: Trial, arguments: Arguments) -> None:
    """Raise `AssertionError` if every further call leaves more of Python's objects."""

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    gc.freeze()  # what is there already is not looked at, which would take seconds
    try:
        counts = [objects()]
        for _ in range(2):
            for _ in range(_CALLS):
                for mode in MODES:
                    held_after(trial, arguments, mode)
            counts.append(objects())
    finally:
        gc.unfreeze()
    # Twice in a row: other threads and caches make objects too, but not with every call.
    assert any(after - before < _CALLS for before, after in itertools.pairwise(counts)), (
        f"each of {2 * _CALLS} calls leaves objects of Python behind, {(counts[-1] - counts[0]) / (2 * _CALLS):.1f} "
        "of them a call"
    )
