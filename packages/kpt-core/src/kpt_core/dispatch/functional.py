"""Kernels under `torch.func.grad` and `vjp` alone, whose gradients are differentiated by plain PyTorch where asked for.

Two autograd functions with `setup_context`, as torch.func wants them: inside `forward` tensors are plain again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_gradtrackingtensor, unwrap_if_dead

from kpt_core.contract import Call, Op

from .autograd import Gradients, Kept, flat, gradients, wanted
from .candidates import Candidate, candidates_of, first_of
from .containment import as_tuple, checked
from .run import choose_and_run
from .settings import effective
from .transforms import is_lone_gradient, under_transform, warn_of_memory


def unwrapped(op: Op[..., Any], call: Call) -> Call:
    """Return the call with the tensors that `torch.func.grad` tracks as they are outside of it, and what it needs."""
    given = {name: getattr(call, name) for name in op.kinds}
    inner = call._replace(**{name: get_unwrapped(each) for name, each in given.items() if _is_tracked(each)})
    if not torch.is_grad_enabled():
        return inner
    # One that torch.func does not differentiate by may still want a gradient outside.
    needs = {*wanted(op, call), *wanted(op, inner)}
    return inner._replace(needs=tuple(name for name in op.kinds if name in needs))


def _is_tracked(value: Any) -> bool:
    return value is not None and is_gradtrackingtensor(value)


def run_tracked(op: Op[..., Any], call: Call, inner: Call) -> Any:
    """Run the best kernel under `torch.func.grad`.

    Args:
        op: the op.
        call: the call.
        inner: the same, unwrapped: kernels are chosen by it.
    """
    first = first_of(op, inner)

    def run(op: Op[..., Any], candidate: Candidate | None, inner: Call) -> Any:
        if candidate is None:
            warn_of_memory(op, inner)
            return op.run_reference(call)
        if candidate.kernel.differentiable:
            return candidate.forward(call._replace(config=inner.config))
        record = Kept(op, inner._replace(**dict.fromkeys(op.kinds)), {})
        found = as_tuple(Tracked.apply(record, candidate, *flat(op, call)))[: op.result_count]  # type: ignore[no-untyped-call]
        return found if op.result_count > 1 else found[0] if found else None

    return choose_and_run(op, inner, candidates_of(op, first.device, first.dtype), effective(), run)


class Tracked(torch.autograd.Function):
    """Runs a kernel's forward; gives its results, and what it saves."""

    @staticmethod
    def forward(record: Kept, candidate: Candidate, *tensors: Tensor | None) -> Any:  # noqa: D102
        call = record.whole(tensors)
        results, saved = checked(record.op, candidate, call, candidate.forward(call))
        return (*as_tuple(results), *(saved if call.needs else ()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        record, ctx.candidate, *tensors = inputs
        ctx.kept, kept = Kept.of(record.op, record.whole(tensors))
        outputs = as_tuple(output)
        own = () if record.op.saves == "results" else outputs[record.op.result_count :]
        ctx.save_for_backward(*kept, *(outputs if record.op.saves == "results" else own))
        ctx.mark_non_differentiable(*own)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # noqa: D102
        op, candidate, grads = ctx.kept.op, ctx.candidate, grads[: ctx.kept.op.result_count]
        count = len(op.tensors)
        tensors = _saved(ctx)
        call, saved = ctx.kept.whole(tensors[:count]), tensors[count:]
        wanting = zip(op.tensors, ctx.needs_input_grad[2:], strict=True)
        call = call._replace(needs=tuple(op.parameters[place] for place, need in wanting if need))
        found: Gradients = {}
        if call.needs and any(grad is not None for grad in grads):
            if under_transform() and not is_lone_gradient():
                warn_of_memory(op, call, derivatives=1)
                given = _pull(op, call, grads)
            else:
                record = Kept(op, call._replace(**dict.fromkeys(op.kinds)), {})
                given = TrackedBackward.apply(record, candidate, *grads, *flat(op, call), *saved)  # type: ignore[no-untyped-call]
            found = dict(zip(call.needs, given, strict=True))
        return (None, None, *flat(op, [found.get(name) for name in op.parameters]))


class TrackedBackward(torch.autograd.Function):
    """Runs a kernel's backward; its own derivative is that of the reference's gradients."""

    @staticmethod
    def forward(record: Kept, candidate: Candidate, *given: Tensor | None) -> Any:  # noqa: D102
        grads, call, saved = _parts(record, given)
        with torch._C._DisableAutocast():
            found = gradients(record.op, candidate, call, saved, grads)
        return tuple(found[name] for name in call.needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        ctx.record, _, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:  # noqa: D102
        given, record = _saved(ctx), ctx.record
        places = [place for place, need in enumerate(ctx.needs_input_grad[2:]) if need]

        def again(*values: Tensor) -> tuple[Tensor, ...]:
            whole = list(given)
            for place, value in zip(places, values, strict=True):
                whole[place] = value
            grads, call, _ = _parts(record, whole)
            return _pull(record.op, call, grads)

        warn_of_memory(record.op, _parts(record, given)[1], derivatives=2)
        pull: Callable[..., Any] = torch.func.vjp(again, *(given[place] for place in places))[1]
        found = dict(zip(places, pull(slopes), strict=True))
        return (None, None, *(found.get(place) for place in range(len(given))))


def _saved(ctx: Any) -> list[Tensor | None]:
    """Return what was saved; a function of `torch.func.vjp` may be called when its transform has ended."""
    return [None if each is None else unwrap_if_dead(each) for each in ctx.saved_tensors]


def _parts(record: Kept, given: Sequence[Tensor | None]) -> tuple[tuple[Tensor | None, ...], Call, tuple[Any, ...]]:
    """Return gradients of the results, the call, and what was saved."""
    first, last = record.op.result_count, record.op.result_count + len(record.op.tensors)
    return tuple(given[:first]), record.whole(given[first:last]), tuple(given[last:])


def _pull(op: Op[..., Any], call: Call, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients of what the call needs, by the reference, in a way that every transform goes through."""
    present = [place for place, grad in enumerate(grads) if grad is not None]

    def results(*values: Tensor) -> tuple[Tensor, ...]:
        found = as_tuple(op.run_reference(call._replace(**dict(zip(call.needs, values, strict=True)))))
        return tuple(found[place] for place in present)

    with torch._C._DisableAutocast():
        pull: Callable[..., Any] = torch.func.vjp(results, *(getattr(call, name) for name in call.needs))[1]
        return tuple(pull(tuple(grads[place] for place in present)))
