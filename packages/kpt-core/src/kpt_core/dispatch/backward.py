"""Gradients of an op: of the kernel that ran, of the next one where it raises, and of the reference in the end."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kpt_core.contract import Call
from kpt_core.errors import RegistrationError

from .candidates import Candidate
from .choice import choose, first_of
from .containment import as_tuple, checked, is_contained, raise_of_call, warn_of_failures
from .fallback import fall_back
from .settings import effective
from .transforms import plain_function

if TYPE_CHECKING:
    from kpt_core.operation import Op

Gradients = dict[str, Any]


def gradients(
    op: "Op[..., Any]",
    candidate: Candidate | None,
    call: Call,
    saved: tuple[Tensor, ...] | None,
    grads: Sequence[Tensor | None],
) -> Gradients:
    """The gradients of the arguments that `call.needs` names.

    Args:
        op: the op.
        candidate: the kernel that ran the forward, None if it is not known.
        call: the call.
        saved: what the forward saved; None if it saved nothing, and the forward has to run again.
        grads: of the results.
    """
    first, scope = first_of(op, call), effective()
    found = op.candidates(first.device, first.dtype)
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
                raise_of_call(error, call, failed)
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
            candidate.keep_from(call, error)
            failed.append((candidate, error))
            candidate = None
    warn_of_failures(op.name, failed, candidate, backward=True)
    return result


def _completed(op: "Op[..., Any]", call: Call, given: Gradients) -> Gradients:
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
    """Whether gradients are those of a transform, which no kernel may see: of `is_grads_batched`, for instance."""
    of_autograd = torch._C._functorch.is_legacy_batchedtensor
    return torch._C._are_functorch_transforms_active() or any(grad is not None and of_autograd(grad) for grad in grads)


def plain_gradients(op: "Op[..., Any]", call: Call, grads: Iterable[Tensor | None]) -> Gradients:
    """Gradients that can be differentiated themselves: the reference's, or those of a torch kernel in its place."""
    function = op.run_reference if mapped(grads) else plain_function(op, call)
    return function_gradients(op, function, call, grads, create_graph=True)


def function_gradients(
    op: "Op[..., Any]",
    function: Callable[[Call], Any],
    call: Call,
    grads: Iterable[Tensor | None],
    *,
    create_graph: bool = False,
) -> Gradients:
    """The gradients of a function of a call's record that autograd differentiates."""

    def primed(value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        # A view, so that paths from one argument to another, outside of the op, are not taken twice.
        return value.view_as(value) if value.requires_grad and create_graph else value.detach().requires_grad_()

    with torch.enable_grad():
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


def copied(op: "Op[..., Any]", call: Call) -> Call:
    """Return a call that may be run without changing the caller's tensors."""
    given = {name: getattr(call, name) for name in op.written}
    return call._replace(**{name: value.clone() for name, value in given.items() if value is not None})
