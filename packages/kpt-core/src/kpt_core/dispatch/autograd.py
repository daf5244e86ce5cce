"""The one autograd function: results of a kernel, tied to the arguments that want a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kpt_core.contract import Call
from kpt_core.errors import InputError

from .backward import gradients, mapped, plain_gradients
from .candidates import Candidate
from .containment import as_tuple

if TYPE_CHECKING:
    from kpt_core.operation import Op


def wanted(op: "Op[..., Any]", call: Call) -> tuple[str, ...]:
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


def flat(op: "Op[..., Any]", call: Sequence[Any]) -> list[Any]:
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

    op: "Op[..., Any]"
    call: Call
    unread: dict[int, tuple[Any, ...]]

    @classmethod
    def of(cls, op: "Op[..., Any]", call: Call) -> tuple[Self, list[Tensor | None]]:
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


def attach(op: "Op[..., Any]", candidate: Candidate, call: Call, results: Any, saved: tuple[Tensor, ...]) -> Any:
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
        ctx: Any, op: "Op[..., Any]", candidate: Candidate, call: Call, results: Any, saved: Any, *every: Any
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
        else:
            found = gradients(op, ctx.candidate, call, saved, grads)
        return (*(None,) * _EXTRA, *flat(op, [found.get(name) for name in op.parameters]))
