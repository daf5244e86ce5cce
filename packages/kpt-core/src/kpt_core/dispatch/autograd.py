"""Gradients: the autograd function that ties results to a kernel, and who computes the gradients in the end."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from kpt_core.contract import Call, Op
from kpt_core.errors import InputError, RegistrationError

from .candidates import Candidate, candidates_of, choose, first_of
from .containment import as_tuple, checked, fall_back, is_contained, raise_of_call, warn_of_failures
from .settings import effective
from .transforms import plain_function

Gradients = dict[str, Any]


def wanted(op: Op[..., Any], call: Call) -> tuple[str, ...]:
    """Return the names of the arguments that want a gradient.

    Raises:
        InputError: one that the op changes does.
    """
    needs = tuple([name for name in op.kinds if (value := getattr(call, name)) is not None and value.requires_grad])
    if needs and not op.mutates.isdisjoint(needs):
        changed = next(name for name in needs if name in op.mutates)
        raise InputError(
            f"{op.name} changes {changed}, which requires a gradient, and none flows through what is changed: give "
            f"{changed}.detach()"
        )
    return needs


def flat(op: Op[..., Any], call: Sequence[Any]) -> list[Any]:
    """Return what a call, or something in its order, has in the places of tensors."""
    return [call[place] for place in op.tensors]


@dataclass(slots=True)
class Kept:
    """A call without its tensors, which autograd keeps.

    Attributes:
        op: the op.
        call: None in the place of tensors.
        unread: place to shape, dtype and device of tensors whose values no gradient depends on.
    """

    op: Op[..., Any]
    call: Call
    unread: dict[int, tuple[Any, ...]]

    @classmethod
    def of(cls, op: Op[..., Any], call: Call) -> tuple[Self, list[Tensor | None]]:
        """Take a call apart: what to keep here, and the tensors to hand to autograd."""
        rest, tensors, unread = list(call), list(call), {}
        for place in op.tensors:
            value = call[place]
            if op.parameters[place] in op.unread and value is not None:
                unread[place] = (value.shape, value.dtype, value.device)
                tensors[place] = None
            rest[place] = None
        return cls(op, op.Call(*rest), unread), flat(op, tensors)

    def whole(self, tensors: Sequence[Tensor | None]) -> Call:
        """Return the call with its tensors in their places again."""
        values = list(self.call)
        for place, tensor in zip(self.op.tensors, tensors, strict=True):
            values[place] = tensor
        for place, (shape, dtype, device) in self.unread.items():
            values[place] = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return self.op.Call(*values)


def attach(op: Op[..., Any], candidate: Candidate, call: Call, results: Any, saved: tuple[Tensor, ...]) -> Any:
    """Return the results with a backward: that of the kernel which gave them."""
    # In a tuple: a tensor that autograd sees come in and go out is a view to it, which may not be written to.
    results = as_tuple(results)
    if op.saves == "results":
        saved = results
    return Dispatched.apply(op, candidate, call, results, saved, *flat(op, call))  # type: ignore[no-untyped-call]


#: Arguments of `Dispatched.forward` before the tensors.
_EXTRA = 5


class Dispatched(torch.autograd.Function):
    """Ties results to a kernel's backward; they were computed before, so that a failure can be contained."""

    # No `setup_context`: torch inspects the signature of such a function in each call, and calls under transforms,
    # which would need it, go to plain PyTorch.
    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, op: Op[..., Any], candidate: Candidate, call: Call, results: Any, saved: Any, *every: Any
    ) -> Any:
        ctx.kept, tensors = Kept.of(op, call)
        ctx.candidate, ctx.count = candidate, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return results if op.result_count > 1 else results[0] if results else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # noqa: D102
        if all(grad is None for grad in grads):
            return (*(None,) * _EXTRA, *(None,) * ctx.count)
        tensors, op = ctx.saved_tensors, ctx.kept.op
        call, saved = ctx.kept.whole(tensors[: ctx.count]), tensors[ctx.count :]
        if torch.is_grad_enabled() or mapped(grads):
            # A graph of the gradients is wanted (create_graph=True), or a batch of them.
            found = plain_gradients(op, call, grads)
        elif torch._C._autograd._profiler_enabled():
            with named(op, "_backward"):
                found = gradients(op, ctx.candidate, call, saved, grads)
        else:
            found = gradients(op, ctx.candidate, call, saved, grads)
        return (*(None,) * _EXTRA, *flat(op, [found.get(name) for name in op.parameters]))


def named(op: Op[..., Any], suffix: str = "") -> record_function:
    """Return a block that a profiler shows under the name that the op has for compilers."""
    return record_function(f"kpt::{op.name.replace('.', '_')}{suffix}")


def gradients(
    op: Op[..., Any],
    candidate: Candidate | None,
    call: Call,
    saved: tuple[Tensor, ...] | None,
    grads: Sequence[Tensor | None],
) -> Gradients:
    """Return the gradients of the arguments that `call.needs` names.

    Args:
        op: the op.
        candidate: the kernel that ran the forward, None if it is not known.
        call: the call.
        saved: what the forward saved; None if it saved nothing, and the forward has to run again.
        grads: of the results.
    """
    first, scope = first_of(op, call), effective()
    found = candidates_of(op, first.device, first.dtype)
    failed: list[tuple[Candidate, Exception]] = []
    while True:
        if candidate is None:
            candidate, tuned, _ = choose(op, call, found)
            call = call._replace(config=None if tuned is None else tuned.config)
        if candidate is None or candidate.kernel.differentiable:
            if candidate is None:
                fall_back(op, found, None, found.refusals)
            function = op.run_reference if candidate is None else candidate.forward
            try:
                result = _completed(op, call, function_gradients(op, function, call, grads))
            except Exception as error:
                raise_of_call(error, failed)
            break
        try:
            if saved is None:
                results, kept = checked(op, candidate, call, candidate.forward(copied(op, call)))
                saved = kept if candidate.saves else as_tuple(results) if op.saves is not None else ()
            result = _completed(op, call, candidate.backward(call, saved, *grads))
            break
        except Exception as error:
            error.add_note(f"raised by the backward of kernel {candidate.identity}")
            if scope.strict or found.explicit or not is_contained(error):
                raise
            candidate.note(error)
            found = found.without(candidate, error)
            failed.append((candidate, error))
            candidate = None
    warn_of_failures(op.name, failed, candidate, backward=True)
    failed.clear()  # their tracebacks hold this frame
    return result


def _completed(op: Op[..., Any], call: Call, given: Gradients) -> Gradients:
    """Return gradients with zeros for None; raise for those that are left out, or are none."""
    if not isinstance(given, dict):
        raise TypeError(f"it gave {given!r:.80}; expected a dictionary: name of an argument to its gradient")
    unknown = given.keys() - set(op.parameters)
    if unknown:
        raise RegistrationError(f"it gave a gradient of {min(unknown)!r}; parameters of {op.name}: {op.parameters}")
    for name in call.needs:
        if name not in given:
            raise TypeError(f"it gave no gradient of {name}; expected one of each of {call.needs}, None for zeros")
        value, gradient = getattr(call, name), given[name]
        if gradient is None:
            given = {**given, name: torch.zeros_like(value)}
        elif not isinstance(gradient, Tensor) or gradient.shape != value.shape:
            told = f"shape {list(gradient.shape)}" if isinstance(gradient, Tensor) else f"{type(gradient)}"
            raise ValueError(f"it gave {name} a gradient of {told}; {name} has {list(value.shape)}")
    return given


def mapped(grads: Iterable[Tensor | None]) -> bool:
    """Return whether gradients are a transform's, which no kernel may see: of `is_grads_batched`, for instance."""
    of_autograd = torch._C._functorch.is_legacy_batchedtensor
    return torch._C._are_functorch_transforms_active() or any(grad is not None and of_autograd(grad) for grad in grads)


def plain_gradients(op: Op[..., Any], call: Call, grads: Iterable[Tensor | None]) -> Gradients:
    """Return gradients that can be differentiated themselves: the reference's, or a torch kernel's in its place."""
    function = op.run_reference if mapped(grads) else plain_function(op, call)
    return function_gradients(op, function, call, grads, create_graph=True)


def function_gradients(
    op: Op[..., Any],
    function: Callable[[Call], Any],
    call: Call,
    grads: Iterable[Tensor | None],
    *,
    create_graph: bool = False,
) -> Gradients:
    """Return the gradients of a function of a call's record that autograd differentiates."""

    def primed(value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        # A view, so that paths from one argument to another, outside of the op, are not taken twice.
        return value.view_as(value) if value.requires_grad and create_graph else value.detach().requires_grad_()

    with _recording():
        here = copied(op, call)._replace(**{name: primed(getattr(call, name)) for name in call.needs})
        results = as_tuple(function(here))
        both = zip(results, grads, strict=True)
        pairs = [(r, g) for r, g in both if g is not None and r is not None and r.requires_grad]
        if not pairs:
            return dict.fromkeys(call.needs)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            [result for result, _ in pairs],
            [getattr(here, name) for name in call.needs],
            [grad for _, grad in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    return {
        name: torch.zeros_like(getattr(here, name)) if gradient is None else gradient
        for name, gradient in zip(call.needs, found, strict=True)
    }


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record, below a dispatch mode too: what a mode passes on it would leave unrecorded, in silence."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    with torch.enable_grad():
        if not excluded.has(torch._C.DispatchKey.AutogradFunctionality):
            yield
            return
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            excluded = excluded.remove(key)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            yield


def copied(op: Op[..., Any], call: Call) -> Call:
    """Return a call that may be run without changing the caller's tensors."""
    given = {name: getattr(call, name) for name in op.written}
    return call._replace(**{name: value.clone() for name, value in given.items() if value is not None})
