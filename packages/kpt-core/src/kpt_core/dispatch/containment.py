"""A kernel that raises: whose fault it is, which calls it is kept from, and who is told."""

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from kpt_core.contract import Call, Refusal
from kpt_core.errors import KernelFailedWarning, KptError, warn_caller

if TYPE_CHECKING:
    from kpt_core.operation import Op

    from .candidates import Candidate

    Failed = Sequence[tuple[Candidate, Exception]]

#: After so many failures a kernel is off for the process.
MOST_FAILURES = 3


class Failures:
    """The calls in which a kernel raised.

    Args:
        unread: places of arguments that are not there in backward, but for their shapes.
    """

    __slots__ = ("_errors", "_unread")

    def __init__(self, unread: Collection[int] = ()) -> None:
        self._errors: dict[Any, str] = {}
        self._unread = unread

    def __bool__(self) -> bool:
        return bool(self._errors)

    def note(self, call: Call, error: Exception) -> None:
        """Keep the kernel from such calls; after `MOST_FAILURES` from all."""
        self._errors[self._signature(call)] = f"{type(error).__name__}: {error}"

    def take_back(self, call: Call) -> None:
        """It was not the kernel's fault."""
        self._errors.pop(self._signature(call), None)

    def refusal(self, call: Call) -> Refusal | None:
        """Why the kernel is kept from a call, or None."""
        if len(self._errors) >= MOST_FAILURES:
            *_, last = self._errors.values()
            return Refusal("quarantined: it raised {count} times, lastly {error}", count=len(self._errors), error=last)
        error = self._errors.get(self._signature(call)) if self._errors else None
        return None if error is None else Refusal("quarantined for such calls: it raised {error}", error=error)

    def _signature(self, call: Call) -> tuple[Any, ...]:
        """What identifies a call: layouts of tensors, plain values, and whether gradients are needed."""

        def describe(value: Any, read: bool = True) -> Any:
            if isinstance(value, Tensor):
                return tuple(value.shape), value.stride() if read else None, value.dtype, value.device
            return value

        # All but the configuration.
        return tuple([describe(value, place not in self._unread) for place, value in enumerate(call[:-1])])


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of an op, of which there may be none, one or several."""
    return results if isinstance(results, tuple) else () if results is None else (results,)


def checked(op: "Op[..., Any]", candidate: "Candidate", call: Call, output: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Take apart what a kernel's forward gave: results, and what is saved for backward.

    Raises:
        TypeError: it is not what the op's contract says: others would read other numbers than were written.
    """
    results, saved = output, ()
    if candidate.saves:
        if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], tuple | list)):
            raise TypeError(f"it gave {_told(output)}; expected (results, saved), since {op.name} says what is saved")
        results, saved = output[0], tuple(output[1])
        if call.needs and len(saved) != op.saved_count:
            raise TypeError(f"it saved {len(saved)} tensors; {op.name} says {op.saved_count}")
    given = as_tuple(results)
    if len(given) != op.result_count:
        raise TypeError(f"it gave {_told(results)}; {op.name} gives {op.result_count} results")
    expected = given if op.fake is None else as_tuple(op.fake(call))
    for place, (told, each) in enumerate(zip(expected, given, strict=True)):
        if place in op.optional_results and not getattr(call, op.optional_results[place]):
            if each is not None:
                raise TypeError(f"result {place} is {_told(each)}; nobody asked for it: expected None")
        elif not isinstance(each, Tensor):
            raise TypeError(f"result {place} is {_told(each)}; expected a tensor")
        elif (told.dtype, told.shape) != (each.dtype, each.shape):
            raise TypeError(f"result {place} is {_told(each)}; the contract of {op.name} says {_told(told)}")
    return results, saved


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"({', '.join(map(_told, value))})" if isinstance(value, tuple) else repr(value)[:60]


def is_contained(error: Exception) -> bool:
    """Whether a failure is the kernel's own: running out of memory and refusals of KPT are not."""
    return not (isinstance(error, KptError | torch.OutOfMemoryError | MemoryError) or _ends_recomputation(error))


def _ends_recomputation(error: Exception) -> bool:
    """Whether activation checkpointing stops a recomputation: it raises where the kernel saves its last tensor."""
    # By name: who has not imported the module can't have raised its error.
    stop = getattr(sys.modules.get("torch.utils.checkpoint"), "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)


def raise_of_call(error: Exception, call: Call, failed: "Failed") -> NoReturn:
    """Raise what plain PyTorch raised after kernels did: the call is wrong, not they."""
    for candidate, _ in failed:
        candidate.failures.take_back(call)
    raise error from (failed[0][1] if failed else error.__cause__)


def warn_of_failures(op: str, failed: "Failed", ran: "Candidate | None", *, backward: bool = False) -> None:
    """Say which kernels raised and what ran in their place."""
    instead = "the reference" if ran is None else ran.kernel.forward
    for candidate, error in failed:
        warn_caller(
            f"{'the backward of ' * backward}kernel {candidate.kernel.forward} raised {type(error).__name__}: {error}; "
            f"it is quarantined for such calls of {op} and {instead} ran (KPT_STRICT=1 raises instead)",
            KernelFailedWarning,
        )
