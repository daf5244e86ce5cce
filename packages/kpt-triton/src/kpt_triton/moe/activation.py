"""Activations of experts and their derivatives inside kernels, in float32.

Gated ones take gate and up: `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain ones one value: `silu`, `gelu`,
`gelu_tanh`, `relu`, `relu2`. `swiglu` has three parameters,
`c(g) * sigmoid(alpha * c(g)) * (clamp(u, -limit, limit) + beta)` with `c` clamping from above at `limit`.
"""

import triton
import triton.language as tl

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

# The interpreter wants constants to the right of tensors.
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
_SQRT_1_OVER_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _curve(x, NAME: tl.constexpr, alpha):
    """The function of one value: that of a plain activation, or of the gate of a gated one."""
    if NAME == "swiglu":
        return x * tl.sigmoid(alpha * x)
    elif NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu" or NAME == "geglu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh" or NAME == "geglu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * tl.sigmoid((x + x * x * x * _CUBIC) * _TWO_SQRT_2_OVER_PI)
    else:
        tl.static_assert(NAME == "relu" or NAME == "reglu" or NAME == "relu2")
        # Not tl.maximum: a NaN stays one.
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive if NAME == "relu2" else positive


@triton.jit
def _slope(x, NAME: tl.constexpr, alpha):
    """The derivative of `_curve`."""
    if NAME == "swiglu":
        sigmoid = tl.sigmoid(alpha * x)
        return sigmoid * (1.0 + alpha * x * (1.0 - sigmoid))
    elif NAME == "silu":
        sigmoid = tl.sigmoid(x)
        return sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif NAME == "gelu" or NAME == "geglu":
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _SQRT_1_OVER_2PI * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh" or NAME == "geglu_tanh":
        sigmoid = tl.sigmoid((x + x * x * x * _CUBIC) * _TWO_SQRT_2_OVER_PI)
        return sigmoid + x * sigmoid * (1.0 - sigmoid) * (1.0 + x * x * _CUBIC * 3.0) * _TWO_SQRT_2_OVER_PI
    elif NAME == "relu2":
        return 2.0 * tl.where(x < 0, 0.0, x)
    else:
        tl.static_assert(NAME == "relu" or NAME == "reglu")
        return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def activate(gate, up, alpha, beta, limit, NAME: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr):
    """The activation; `up` is unused unless IS_GATED, `limit` unless LIMITED."""
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = _curve(gate, NAME, alpha)
    if IS_GATED:
        if NAME == "swiglu":
            up = up + beta
        value = value * up
    return value


@triton.jit
def activate_backward(
    grad, gate, up, alpha, beta, limit, NAME: tl.constexpr, IS_GATED: tl.constexpr, LIMITED: tl.constexpr
):
    """The gradients of gate and up, given that of the activation."""
    c_gate = gate
    c_up = up
    if LIMITED:
        c_gate = tl.where(gate > limit, limit, gate)
        c_up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if not IS_GATED:
        return grad * _slope(c_gate, NAME, alpha), grad
    else:
        factor = c_up
        if NAME == "swiglu":
            factor = c_up + beta
        grad_gate = grad * factor * _slope(c_gate, NAME, alpha)
        grad_up = grad * _curve(c_gate, NAME, alpha)
        if LIMITED:
            grad_gate = tl.where(gate > limit, 0.0, grad_gate)
            grad_up = tl.where((up > limit) | (up < -limit), 0.0, grad_up)
        return grad_gate, grad_up
