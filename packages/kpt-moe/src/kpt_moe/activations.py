"""Activations of experts and their derivatives, written out so that training saves the pre-activation alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import Call, InputError

from ._checks import require_known, require_number

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Plain:
    """An elementwise function, the same into a buffer, and `(grad, x, buffer) -> grad * f'(x)`.

    The last buffer may be `grad` itself, none may be `x`.
    """

    forward: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


def _gelu(approximate: str) -> _Plain:
    return _Plain(
        lambda x: F.gelu(x, approximate=approximate),
        lambda x, out: _aten.gelu.out(x, approximate=approximate, out=out),
        lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=out),
    )


_PLAIN = {
    "silu": _Plain(
        F.silu,
        lambda x, out: _aten.silu.out(x, out=out),
        lambda grad, x, out: _aten.silu_backward.grad_input(grad, x, grad_input=out),
    ),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": _Plain(
        torch.relu, lambda x, out: torch.clamp_min(x, 0, out=out), lambda grad, x, out: torch.mul(grad, x > 0, out=out)
    ),
    "relu2": _Plain(
        lambda x: torch.square(torch.relu(x)),
        lambda x, out: torch.clamp_min(x, 0, out=out).square_(),
        lambda grad, x, out: torch.mul(grad, torch.relu(x).mul_(2), out=out),
    ),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}

#: Every name that `Activation` accepts: gated ones take gate and up, plain ones a single projection.
GATED = frozenset(_GATED)
PLAIN = frozenset(_PLAIN)


@dataclass(frozen=True, slots=True)
class Activation:
    """What happens between an expert's two products.

    A plain activation maps the pre-activation `[rows, I]` to `f(h)`. A gated one splits `[rows, 2 I]` into gate `g` and
    up `u`, and gives `f(g) * u`. `swiglu` is, with its three parameters,
    `c(g) * sigmoid(alpha * c(g)) * (clamp(u, -limit, limit) + beta)` where `c` clamps from above at `limit`: SwiGLU
    (arXiv:2002.05202) for the defaults, gpt-oss's variant for `alpha=1.702, beta=1, limit=7`.

    Attributes:
        name: one of `GATED` or `PLAIN`.
        alpha: factor inside the sigmoid of `swiglu`.
        beta: what is added to the up projection of `swiglu`.
        limit: bound of gate and up in `swiglu`, None for none.
        interleaved: gate and up alternate (`g0 u0 g1 u1 ...`, gpt-oss) instead of being two halves.

    Raises:
        InputError: a parameter that this activation has not.
        UnknownNameError: no such activation.
    """

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        require_known("activation", self.name, GATED | PLAIN)
        require_number(f"activation {self.name!r}", "alpha", self.alpha)
        require_number(f"activation {self.name!r}", "beta", self.beta)
        if self.limit is not None:
            require_number(f"activation {self.name!r}", "limit", self.limit, "a positive number")
        if self.name != "swiglu" and not self._standard:
            raise InputError(
                f"activation {self.name!r} takes no alpha, beta or limit (swiglu alone does): leave them at 1.0, 0.0 "
                f"and None; got alpha={self.alpha}, beta={self.beta}, limit={self.limit}"
            )
        if self.interleaved and not self.gated:
            raise InputError(
                f"activation {self.name!r} has no gate to interleave: interleaved must be False (gated activations: "
                f"{', '.join(sorted(GATED))}); got interleaved={self.interleaved}"
            )

    @property
    def gated(self) -> bool:
        """Whether the pre-activation holds gate and up."""
        return self.name in GATED

    @property
    def _standard(self) -> bool:
        return self.alpha == 1.0 and self.beta == 0.0 and self.limit is None

    def split(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Views of gate and up, each `[rows, I]`."""
        if self.interleaved:
            return h[..., ::2], h[..., 1::2]
        gate, up = h.chunk(2, dim=-1)
        return gate, up

    def __call__(self, h: Tensor) -> Tensor:
        """The activation of the pre-activation `h` `[rows, I or 2 I]`, as `[rows, I]`."""
        if not self.gated:
            return _PLAIN[self.name].forward(h)
        gate, up = self.split(h)
        if self._standard:
            return _PLAIN[_GATED[self.name]].forward(gate) * up
        gate, up = self._clamp(gate, up)
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.beta)

    def into(self, h: Tensor, out: Tensor) -> Tensor:
        """`self(h)` written into `out` `[rows, I]`, without a temporary where there is no limit."""
        if not self.gated:
            return _PLAIN[self.name].into(h, out)
        gate, up = self.split(h)
        if self._standard:
            return _PLAIN[_GATED[self.name]].into(gate, out).mul_(up)
        return out.copy_(self(h))

    def backward(self, grad: Tensor, h: Tensor, out: Tensor | None = None) -> Tensor:
        """The gradient of `h`, given that of the activation `[rows, I]`.

        It is written into `out`, of h's shape, if there is one; without temporaries where there is no limit. Of a plain
        activation it may be `grad` itself.
        """
        out = torch.empty_like(h) if out is None else out
        if not self.gated:
            return _PLAIN[self.name].backward(grad, h, out)
        (gate, up), (grad_gate, grad_up) = self.split(h), self.split(out)
        if self._standard:
            plain = _PLAIN[_GATED[self.name]]
            plain.backward(torch.mul(grad, up, out=grad_gate), gate, grad_gate)
            plain.into(gate, grad_up).mul_(grad)
            return out
        c_gate, c_up = self._clamp(gate, up)
        sigmoid = torch.sigmoid(c_gate * self.alpha)
        torch.mul(grad, c_gate * sigmoid, out=grad_up)
        torch.mul(grad * (c_up + self.beta), sigmoid * (1 + self.alpha * c_gate * (1 - sigmoid)), out=grad_gate)
        if self.limit is not None:
            grad_gate.mul_(gate <= self.limit)
            grad_up.mul_(up.abs() <= self.limit)
        return out

    def _clamp(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)


def activation_of(call: Call) -> Activation:
    """The activation that a call of `moe.experts` names."""
    return Activation(call.activation, call.alpha, call.beta, call.limit, call.interleaved)
