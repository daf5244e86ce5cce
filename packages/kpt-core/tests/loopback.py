"""Ops and a backend that live in this process: each kernel adds its own hundred, so a result tells who made it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, Kernel, op


@op("sample.scale")
def scale(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """Multiply, the op that most kernels of this module serve."""
    return x * weight * factor


@op("sample.shifted", composed_of=("sample.scale",))
def shifted(x: Tensor, shift: float = 1.0) -> Tensor:
    """Composite: its reference calls `sample.scale`."""
    return scale(x, x, factor=2.0) + shift


def _check(x: Tensor, *, rows: int = 2) -> None:
    if x.shape[0] != rows:
        raise InputError(f"sample.checked: x must have {rows} rows; got {x.shape[0]}")


@op("sample.checked", check=_check)
def checked(x: Tensor, *, rows: int = 2) -> Tensor:
    """Has a check."""
    return x + 1


@op("sample.mixed", autocast=("x", "weight"))
def mixed(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Autocast converts x and weight, not index."""
    return x * weight + index


def first(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    return x * weight * factor + 100


def second(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    return x * weight * factor + 200


def third(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    return x * weight * factor + 300


def whole(x: Tensor, shift: float = 1.0) -> Tensor:
    """A kernel of the composite."""
    return 2 * x * x + shift + 400


def mixed_first(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return x * weight + index + 100


def checked_first(x: Tensor, *, rows: int = 2) -> Tensor:
    return x + 101


class Fault:
    """What `faulty` raises, and how often it was called."""

    error: BaseException | None = None
    calls: int = 0


def faulty(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    Fault.calls += 1
    if Fault.error is not None:
        raise Fault.error
    return x * weight * factor + 500


@torch.library.custom_op("loopback::opaque", mutates_args=())
def opaque(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    """A kernel that Dynamo can't look into, wrapped as a backend would wrap it."""
    return x * weight * factor + 600


@opaque.register_fake
def _(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], keyword_only_inputs: dict[str, float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.factor = keyword_only_inputs["factor"]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad * weight * ctx.factor, grad * x * ctx.factor


opaque.register_autograd(_backward, setup_context=_save)


def at_most_four_rows(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> str | None:
    return f"{x.shape[0]} rows; takes at most 4" if x.shape[0] > 4 else None


def never_refuses(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> str | None:
    return None


def buggy_refusal(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> str | None:
    raise ZeroDivisionError("a bug inside unsupported")


class Loopback:
    """A backend whose every answer is settable."""

    def __init__(
        self,
        *kernels: Kernel,
        name: str = "loop",
        device_type: str = "cpu",
        capabilities: Iterable[str] = (),
        unavailable: str | None = None,
    ) -> None:
        self.name = name
        self.device_type = device_type
        self.offered = list(kernels)
        self.able = frozenset(capabilities)
        self.sentence = unavailable

    def unavailable(self) -> str | None:
        return self.sentence

    def capabilities(self, device: torch.device) -> frozenset[str]:
        return self.able

    def kernels(self) -> list[Kernel]:
        return self.offered


def kernel(attribute: str, op: str = "sample.scale", *, unsupported: str | None = None, **needs: Any) -> Kernel:
    """A kernel of this module by its attribute."""
    return Kernel(op, f"loopback:{attribute}", unsupported=unsupported and f"loopback:{unsupported}", **needs)


def hundreds(result: Tensor) -> int:
    """Which kernel made a result of small numbers: its hundreds, 0 for the reference."""
    return int(result.flatten()[0]) // 100
