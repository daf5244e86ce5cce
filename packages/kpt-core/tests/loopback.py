"""Ops and a backend that live in this process: each kernel adds its own hundred, so a result tells who made it."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from kpt_core import Backend, Call, InputError, Kernel, Refusal, op


@op("sample.scale")
def scale(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """Multiply, the op that most kernels of this module serve."""
    return x * weight * factor


@op("sample.shifted")
def shifted(x: Tensor, shift: float = 1.0) -> Tensor:
    """The kernel `parts` composes it of `sample.scale`."""
    return x * x * 2.0 + shift


def _check(call: Call) -> None:
    if call.x.shape[0] != call.rows:
        raise InputError(f"sample.checked: x must have {call.rows} rows; got {call.x.shape[0]}")


@op("sample.checked", check=_check)
def checked(x: Tensor, *, rows: int = 2) -> Tensor:
    """Has a check."""
    return x + 1


@op("sample.mixed", autocast=("x", "weight"))
def mixed(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Autocast converts x and weight, not index."""
    return x * weight + index


def _forward(hundred: int) -> Callable[[Call], Tensor]:
    return lambda call: call.x * call.weight * call.factor + hundred


def _backward(hundred: int) -> Callable[..., dict[str, Tensor]]:
    def run(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
        other = {"x": call.weight, "weight": call.x}
        return {name: grad * other[name] * call.factor + hundred for name in call.needs}

    return run


first, second, third = map(_forward, (100, 200, 300))
#: Gradients tell who made them, too; `backward` gives the right ones.
backward, first_backward, second_backward = map(_backward, (0, 100, 200))


def whole(call: Call) -> Tensor:
    """A kernel of the composite."""
    return 2 * call.x * call.x + call.shift + 400


def parts(call: Call) -> Tensor:
    """A kernel of the composite that calls another op."""
    return scale(call.x, call.x, factor=2.0) + call.shift


def mixed_first(call: Call) -> Tensor:
    return call.x * call.weight + call.index + 100


def checked_first(call: Call) -> Tensor:
    return call.x + 101


class Fault:
    """What `faulty` and its backward raise, and how often they were called."""

    INITIAL: ClassVar[dict[str, object]] = {"error": None, "in_backward": None, "calls": 0, "backward_calls": 0}
    error: BaseException | None = None
    in_backward: BaseException | None = None
    calls: int = 0
    backward_calls: int = 0


def faulty(call: Call) -> Tensor:
    Fault.calls += 1
    if Fault.error is not None:
        raise Fault.error
    return call.x * call.weight * call.factor + 500


def faulty_backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    Fault.backward_calls += 1
    if Fault.in_backward is not None:
        raise Fault.in_backward
    return _backward(500)(call, saved, grad)


def at_most_four_rows(call: Call) -> Refusal | None:
    rows = call.x.shape[0]
    return Refusal("{rows} rows; takes at most 4", rows=rows) if rows > 4 else None


def never_refuses(call: Call) -> None:
    return None


def refuses_all(call: Call) -> str:
    return "this kernel takes nothing"


def buggy_refusal(call: Call) -> str | None:
    raise ZeroDivisionError("a bug inside unsupported")


class Loopback(Backend):
    """A backend whose every answer is settable."""

    def __init__(
        self,
        *kernels: Kernel,
        name: str = "loop",
        device_types: tuple[str, ...] = ("cpu",),
        capabilities: Iterable[str] = (),
        unavailable: str | None = None,
        slow: bool = False,
    ) -> None:
        self.name = name
        self.device_types = device_types
        self.offered = list(kernels)
        self.able = frozenset(capabilities)
        self.sentence = unavailable
        self.slow = slow

    def unavailable(self) -> str | None:
        return self.sentence

    def capabilities(self, device: torch.device) -> frozenset[str]:
        return self.able

    def reference_is_slow(self, device: torch.device) -> bool:
        return self.slow

    def kernels(self) -> list[Kernel]:
        return self.offered


def kernel(attribute: str, op: str = "sample.scale", **settings: Any) -> Kernel:
    """A kernel of this module by its attribute; a backward and a refusal are named by theirs."""
    for name in ("backward", "unsupported"):
        if name in settings:
            settings[name] = settings[name] and f"loopback:{settings[name]}"
    return Kernel(op, f"loopback:{attribute}", **settings)


def hundreds(result: Tensor) -> int:
    """Which kernel made a result of small numbers: its hundreds, 0 for the reference."""
    return int(result.flatten()[0]) // 100
