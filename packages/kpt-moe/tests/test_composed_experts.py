import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kpt_core import record
from kpt_moe.activations import Activation
from kpt_moe.composed_experts import composed_experts
from oracle import ACTIVATIONS, Inputs, activate, gradients, make_inputs, naive_experts


def cubed(h: Tensor) -> Tensor:
    """An activation that no op knows."""
    gate, up = h.chunk(2, dim=-1)
    return gate**3 * up


def norm(y: Tensor) -> Tensor:
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3)


def check(inputs: Inputs, naive_activation, activation, **choices) -> None:
    grad = torch.randn(inputs.x.shape, dtype=inputs.x.dtype)
    have, have_grads = gradients(lambda i: composed_experts(*i.args, activation=activation, **choices), inputs, grad)
    want, want_grads = gradients(lambda i: naive_experts(i, activation=naive_activation, **choices), inputs, grad)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(have_grads, want_grads)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_known_activations(activation, transposed, bias):
    inputs = make_inputs(activation=activation, transposed=transposed, bias=bias, sentinels=True)
    check(inputs, lambda h: activate(h, activation), Activation(activation), transposed=transposed)


@pytest.mark.parametrize("post_norm", [None, norm])
@pytest.mark.parametrize(
    "sizes", [{"tokens": 0}, {"tokens": 1}, {"tokens": 63}, {"top_k": 5}, {"num_experts": 30}], ids=str
)
def test_functions_of_the_caller(sizes, post_norm):
    check(make_inputs(bias=True, **sizes), cubed, cubed, post_norm=post_norm)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("post_norm", [None, norm])
def test_what_no_expert_owns_does_not_leak(post_norm, poison):
    clean = make_inputs(tokens=12, bias=True)
    away = torch.zeros(12, 3, dtype=torch.bool)
    away[2], away[7], away[9, 1] = True, True, True
    nowhere, index = away.all(1, keepdim=True), torch.where(away, 5, clean.index)
    grad = torch.randn_like(clean.x)

    def run(value: float, function) -> tuple[Tensor, list[Tensor]]:
        x, weights = clean.x.masked_fill(nowhere, value), clean.weights.masked_fill(away, value)
        return gradients(function, Inputs(x, index, weights, *clean.args[3:]), grad.masked_fill(nowhere, value))

    have, have_grads = run(poison, lambda i: composed_experts(*i.args, activation=cubed, post_norm=post_norm))
    want, want_grads = run(0.0, lambda i: naive_experts(i, activation=cubed, post_norm=post_norm))
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(have_grads, want_grads)


def test_first_and_second_derivative():
    inputs = make_inputs(tokens=4, hidden=3, inner=2, num_experts=3, bias=True, sentinels=True).leaves()

    def function(x: Tensor, *rest: Tensor) -> Tensor:
        return composed_experts(x, inputs.index, *rest, activation=cubed, post_norm=norm)

    assert gradcheck(function, inputs.floats)
    assert gradgradcheck(function, inputs.floats)


def test_inputs_are_not_modified():
    inputs = make_inputs(bias=True, sentinels=True).leaves()
    before = [tensor.detach().clone() for tensor in inputs.args]
    composed_experts(*inputs.args, activation=cubed).sum().backward()
    assert all(torch.equal(a.detach(), b) for a, b in zip(inputs.args, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_that_of_x(dtype):
    inputs = make_inputs(dtype=dtype)
    weights = inputs.weights.float()
    out = composed_experts(inputs.x, inputs.index, weights, *inputs.args[3:], activation=Activation("swiglu"))
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), naive_experts(inputs.to(torch.float64)), rtol=0.05, atol=0.05)


def test_grouped_products_serve_it():
    with record() as log:
        composed_experts(*make_inputs().args, activation=cubed)
    assert [selection.op for selection in log] == ["moe.grouped_mm", "moe.grouped_mm"]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_without_a_break(dynamic):
    compiled = torch.compile(composed_experts, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 8):
        inputs = make_inputs(tokens=tokens, bias=True, sentinels=True)
        grad = torch.randn(tokens, 8, dtype=torch.float64)
        have, have_grads = gradients(lambda i: compiled(*i.args, activation=cubed), inputs, grad)
        want, want_grads = gradients(lambda i: naive_experts(i, activation=cubed), inputs, grad)
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(have_grads, want_grads)
