import pytest
import torch
import triton
import triton.language as tl
from in_float64 import activation, wide

from kpt_triton.moe.activation import GATED, PLAIN, activate, activate_backward
from kpt_triton.moe.experts_forward import Gating

# NumPy, by which the interpreter computes, warns where results are infinite or NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

INF, NAN = float("inf"), float("nan")
SIZE = 4096
PARAMETERS = [(1.0, 0.0, None), (1.702, 1.0, None), (1.702, 1.0, 2.5), (1.0, 0.0, 0.5), (0.5, -1.0, 0.0)]
NAMES = [(name, *PARAMETERS[0]) for name in GATED + PLAIN] + [("swiglu", *values) for values in PARAMETERS[1:]]


@triton.jit
def _kernel(
    grad, gate, up, value, grad_gate, grad_up, alpha, beta, limit, size,
    NAME: tl.constexpr, IS_GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, BLOCK)
    mask = places < size
    d = tl.load(grad + places, mask=mask)
    g = tl.load(gate + places, mask=mask)
    u = tl.load(up + places, mask=mask)
    tl.store(value + places, activate(g, u, alpha, beta, limit, NAME, IS_GATED, LIMITED), mask=mask)
    of_gate, of_up = activate_backward(d, g, u, alpha, beta, limit, NAME, IS_GATED, LIMITED)
    tl.store(grad_gate + places, of_gate, mask=mask)
    tl.store(grad_up + places, of_up, mask=mask)


def run(act, grad, gate, up):
    """The activation and the gradients of gate and up."""
    results = [torch.empty_like(gate) for _ in range(3)]
    _kernel[(1,)](grad, gate, up, *results, *act.numbers(), gate.numel(), **act.constants(), BLOCK=SIZE)
    return results


def expected(act, grad, gate, up):
    """By torch's functions and its autograd, in the dtype of what is given."""
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h = torch.stack((gate, up), -1) if act.gated else gate
    value = activation(h, act.name, True, act.alpha, act.beta, act.limit)
    value = value.squeeze(-1) if act.gated else value
    value.backward(grad)
    return value.detach(), gate.grad, up.grad


@pytest.mark.parametrize(("name", "alpha", "beta", "limit"), NAMES)
def test_values_and_derivatives_are_those_of_float64(name, alpha, beta, limit, device):
    act = Gating(name, alpha=alpha, beta=beta, limit=limit)
    grad, gate, up = (torch.randn(SIZE, device=device) * 3 for _ in range(3))
    got = run(act, grad, gate, up)
    want = expected(act, wide(grad), wide(gate), wide(up))
    for one, other in zip(got[: 3 if act.gated else 2], want, strict=False):
        # Some roundings of float32, relative to the numbers that are multiplied: in tails they cancel.
        scale = (1 + wide(gate).square()) * (1 + wide(grad).abs()) * (1 + wide(up).abs())
        assert ((wide(one) - other).abs() <= 32 * 2.0**-24 * scale).all()
        assert other.abs().max() > 1 or limit is not None


@pytest.mark.parametrize(("name", "alpha", "beta", "limit"), NAMES)
def test_nan_and_infinities_give_what_torch_gives(name, alpha, beta, limit, device):
    act = Gating(name, alpha=alpha, beta=beta, limit=limit)
    numbers = torch.tensor([NAN, INF, -INF, 1e30, -1e30, 0.0, -0.0, 1.5], device=device)
    gate, up = numbers.repeat_interleave(8), numbers.repeat(8)
    value, _, _ = run(act, torch.ones_like(gate), gate, up)
    want, _, _ = expected(act, torch.ones_like(gate), gate, up)
    torch.testing.assert_close(value, want, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", GATED + PLAIN)
def test_gradients_of_nan_are_nan_and_those_of_zero_are_torchs(name, device):
    act = Gating(name)
    gate, up, grad = (torch.tensor(numbers, device=device) for numbers in ([NAN, 0.0], [1.5, 1.5], [1.0, 1.0]))
    _, of_gate, of_up = run(act, grad, gate, up)
    _, want_gate, want_up = expected(act, grad, gate, up)
    torch.testing.assert_close(of_gate[1], want_gate[1])
    if name not in ("relu", "reglu"):  # whose slope is 0 or 1 whatever the gate holds
        assert of_gate[0].isnan()
    if act.gated:
        assert of_up[0].isnan()
        torch.testing.assert_close(of_up[1], want_up[1])


@pytest.mark.parametrize(("gate", "up", "passes"), [(2.0, 1.0, (1, 1)), (2.1, 1.0, (0, 1)), (1.0, -2.1, (1, 0))])
def test_a_clamped_value_gets_no_gradient_and_one_at_the_limit_does(gate, up, passes, device):
    act = Gating("swiglu", beta=1.0, limit=2.0)
    ones = torch.ones(1, device=device)
    _, of_gate, of_up = run(act, ones, ones * gate, ones * up)
    assert (bool(of_gate != 0), bool(of_up != 0)) == passes
