"""What the functions of JAX are specialised for beside shapes and dtypes, as torch's side knows it; all hashable."""

from typing import NamedTuple


class Activation(NamedTuple):
    """An activation of `moe.experts`, its parameters as there."""

    name: str
    alpha: float
    beta: float
    limit: float | None
    interleaved: bool


class Layout(NamedTuple):
    """Of `moe.experts`.

    Attributes:
        activation: between the products.
        transposed: whether matrices are stored as input by output.
    """

    activation: Activation
    transposed: bool


class Scores(NamedTuple):
    """Of `attention.dense`, its parameters as there.

    Attributes:
        causal: whether a query sees the keys up to its own position alone.
        scale: of the scores.
        softcap: likewise, 0 for none.
    """

    causal: bool
    scale: float
    softcap: float


class Choice(NamedTuple):
    """Of `moe.top_k_gating`, its parameters as there."""

    top_k: int
    score: str
    renormalize: bool
    scale: float
    num_groups: int
    top_groups: int
