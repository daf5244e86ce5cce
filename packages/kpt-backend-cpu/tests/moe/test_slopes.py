"""Slopes of activations keep their digits where the sigmoid in them is near one or zero."""

import pytest
import torch

import kpt_core
from kpt_moe.activations import PLAIN

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
#: Of one: a few roundings of float32. A slope with `1 - s` in it was off by 6e-7 here.
TOLERANCE = 2.5e-7


def slope(activation: str, x: torch.Tensor, target: str) -> torch.Tensor:
    """Of an expert that gives `activation(x) * 1`: hidden size 2 of `x` and a one, the gate reads one, up the other."""
    rows = torch.stack((x, torch.ones_like(x)), 1).requires_grad_()
    projections = torch.eye(2, dtype=x.dtype)[: 2 if activation in GATED else 1]
    index, weights = torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1, dtype=x.dtype)
    down = torch.tensor([[[1.0], [0.0]]], dtype=x.dtype)
    with kpt_core.use(target):
        out = kpt_core.ops()["moe.experts"](rows, index, weights, projections.unsqueeze(0), down, activation=activation)
    out[:, 0].sum().backward()
    return rows.grad[:, 0]


@pytest.mark.parametrize("activation", [*GATED, *GATED.values()])
def test_slope_is_that_of_float64(activation):
    x = torch.linspace(-20, 20, 4001)
    error = (slope(activation, x, "cpu").double() - slope(activation, x.double(), "reference")).abs()
    assert error.max() <= TOLERANCE, f"{error.max():.2g} at {x[error.argmax()]:.4g}"


@pytest.mark.parametrize("activation", [*GATED, *GATED.values()])
@pytest.mark.parametrize("x", [-1e4, -120.0, 120.0, 1e4])
def test_slope_far_out_is_zero_or_one(activation, x):
    assert slope(activation, torch.full((20,), x), "cpu").tolist() == [float(x > 0)] * 20


def test_every_smooth_activation_is_tried():
    assert {*PLAIN} - {"relu", "relu2"} == {*GATED.values()}
