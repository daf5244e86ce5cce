"""Right kernels of 8-bit numbers, step by step: each fault in `fp8` changes one of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import honest_fp8
from kpt_fp8.formats import FORMATS
from kpt_fp8.quantize import quantize as specified
from kpt_fp8.stochastic import random_bits

from .mutant import Mutant

MUTANTS: list[Mutant] = []


class Quantize:
    """A right kernel of `fp8.quantize`, step by step."""

    def read(self, call: Any) -> Tensor:
        return call.x.detach().to(torch.float32)

    def scaled_by(self, call: Any, x: Tensor) -> Tensor:
        if call.scale is not None:
            return call.scale.detach().clone()
        given = call._asdict() | {"x": x, "stochastic": False, "scale_dtype": torch.float32}
        return self.rounded_scale(call, self.scale_of(call, given))

    def scale_of(self, call: Any, given: dict[str, Any]) -> Tensor:
        return specified.reference(**{name: value for name, value in given.items() if name in _PARAMETERS})[1]

    def rounded_scale(self, call: Any, scale: Tensor) -> Tensor:
        return scale.to(call.scale_dtype)

    def spread(self, call: Any, scale: Tensor, shape: torch.Size) -> Tensor:
        return honest_fp8.spread(scale.to(torch.float32), shape, call.granularity)

    def divided(self, call: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x / scale

    def most(self, call: Any) -> float:
        return FORMATS[call.dtype].most

    def clamped(self, call: Any, quotient: Tensor) -> Tensor:
        return quotient.clamp(-self.most(call), self.most(call))

    def drawn(self, call: Any, count: int) -> Tensor:
        return random_bits(count, call.seed, call.offset, call.x.device)

    def rounded(self, call: Any, quotient: Tensor) -> Tensor:
        if not call.stochastic:
            return quotient
        form = FORMATS[call.dtype]
        exponent = (torch.frexp(quotient.double().abs())[1] - 1).clamp(min=1 - form.bias)
        steps = quotient.double().abs() * torch.exp2(form.mantissa_bits - exponent.double())
        part = (self.drawn(call, quotient.numel()) >> 8).view(quotient.shape).double() * 2.0**-24
        whole = steps.floor() + (part < steps - steps.floor())
        return (whole * torch.exp2(exponent.double() - form.mantissa_bits)).copysign(quotient.double()).float()

    def __call__(self, call: Any) -> tuple[Tensor, Tensor]:
        x = self.read(call)
        scale = self.scaled_by(call, x)
        quotient = self.clamped(call, self.divided(call, x, self.spread(call, scale, x.shape)))
        codes = self.rounded(call, quotient).nan_to_num(float("nan")).to(call.dtype)
        return codes.contiguous(), scale.contiguous()


_PARAMETERS = frozenset(specified.parameters)


class Dequantize:
    """A right kernel of `fp8.dequantize`."""

    def decoded(self, call: Any) -> Tensor:
        return call.codes.to(self.wide(call))

    def wide(self, call: Any) -> torch.dtype:
        return torch.float64 if call.dtype is torch.float64 else torch.float32

    def scale(self, call: Any) -> Tensor:
        return honest_fp8.spread(call.scale.to(self.wide(call)), call.codes.shape, call.granularity)

    def __call__(self, call: Any) -> Tensor:
        return (self.decoded(call) * self.scale(call)).to(call.dtype).contiguous()


class ScaledMM:
    """A right kernel of `fp8.scaled_mm`."""

    def wide(self, call: Any) -> torch.dtype:
        return torch.float64 if call.out_dtype is torch.float64 else torch.float32

    def left(self, call: Any) -> Tensor:
        return call.a.to(self.wide(call)) * honest_fp8.spread(
            call.scale_a.to(self.wide(call)), call.a.shape, call.granularity_a
        )

    def scale_b(self, call: Any) -> Tensor:
        return call.scale_b.t() if call.scale_b.dim() == 2 else call.scale_b

    def right(self, call: Any) -> Tensor:
        b = call.b.t()
        return b.to(self.wide(call)) * honest_fp8.spread(
            self.scale_b(call).to(self.wide(call)), b.shape, call.granularity_b
        )

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.t()

    def finished(self, call: Any, product: Tensor) -> Tensor:
        return (product if call.bias is None else product + call.bias).to(call.out_dtype)

    def __call__(self, call: Any) -> Tensor:
        return self.finished(call, self.product(self.left(call), self.right(call)))


class Linear:
    """A right kernel of `fp8.linear` and its backward."""

    def wide(self, call: Any) -> torch.dtype:
        return torch.float64 if call.x.dtype is torch.float64 else torch.float32

    def weight(self, call: Any) -> Tensor:
        scale = honest_fp8.spread(call.scale.to(self.wide(call)), call.weight.shape, call.granularity)
        return call.weight.to(self.wide(call)) * scale

    def rows(self, call: Any) -> Tensor:
        return honest_fp8.rows_of(call, self.wide(call))

    def forward(self, call: Any) -> Tensor:
        out = self.rows(call) @ self.weight(call).t()
        return (out if call.bias is None else out + call.bias).to(call.x.dtype)

    def backward(self, call: Any, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
        wide = grad.to(self.wide(call))
        made = {"x": lambda: wide @ self.weight(call), "bias": lambda: wide.sum(0)}
        return {name: made[name]().to(grad.dtype) for name in call.needs}


def fault(name: str, found_by: str = "values", at: Any = "small") -> Callable[[type], None]:
    """Enter a mutant: the decorated class, of the op of its base. `at` may be a part of a case's name."""

    def enter(cls: type) -> None:
        op = next(op for base, op in _OPS.items() if issubclass(cls, base))
        likely = (lambda trial: at in trial.case.name) if isinstance(at, str) else at
        MUTANTS.append(Mutant(name, op, found_by, lambda: functions(cls()), {}, likely))

    return enter


_OPS: dict[type, str] = {
    Quantize: "fp8.quantize",
    Dequantize: "fp8.dequantize",
    ScaledMM: "fp8.scaled_mm",
    Linear: "fp8.linear",
}


def functions(kernel: Any) -> tuple[Any, ...]:
    """What a backend offers of a kernel."""
    return (kernel.forward, kernel.backward) if isinstance(kernel, Linear) else (kernel,)


def right(op: str) -> tuple[Any, ...]:
    """A kernel of an op without a fault."""
    return functions(next(base for base, name in _OPS.items() if name == op)())
