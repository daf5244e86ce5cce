"""Activations of experts, in float32: what happens between an expert's two products."""

from collections.abc import Callable

import jax
from jax import numpy as jnp

from kpt_backend_tpu.layouts import Activation

_PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def activate(form: Activation, h: jax.Array) -> jax.Array:
    """Return the activation of the pre-activation `h` `[rows, I or 2 I]`, as `[rows, I]`; differentiable."""
    if form.name in _PLAIN:
        return _PLAIN[form.name](h)
    gate, up = (h[:, ::2], h[:, 1::2]) if form.interleaved else jnp.split(h, 2, axis=1)
    if form.name != "swiglu" or (form.alpha, form.beta, form.limit) == (1.0, 0.0, None):
        return _PLAIN[_GATED[form.name]](gate) * up
    if form.limit is not None:
        # Not by `minimum`, whose gradient at the bound is one half.
        gate = jnp.where(gate > form.limit, form.limit, gate)
        up = jnp.where(up > form.limit, form.limit, jnp.where(up < -form.limit, -form.limit, up))
    return gate * jax.nn.sigmoid(gate * form.alpha) * (up + form.beta)
