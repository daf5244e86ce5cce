import pytest
import torch

from kpt_core import InputError, UnknownNameError
from kpt_moe.activations import GATED, PLAIN, Activation
from oracle import ACTIVATIONS, activate
from oracle import GATED as ORACLE_GATED

PARAMETERS = [
    {},
    {"alpha": 1.702},
    {"beta": 1.0},
    {"limit": 0.7},
    {"alpha": 1.702, "beta": 1.0, "limit": 0.7},
    {"alpha": 0.5, "beta": -0.25, "limit": 2.0},
]
VARIANTS = [
    *({"activation": name} for name in ACTIVATIONS),
    *({"activation": name, "interleaved": True} for name in ORACLE_GATED),
    *({"activation": "swiglu", "interleaved": i, **p} for i in (False, True) for p in PARAMETERS[1:]),
]


def make(activation: str, **parameters) -> Activation:
    return Activation(activation, **parameters)


def test_the_names_are_those_of_the_oracle():
    assert set(ACTIVATIONS) == GATED | PLAIN
    assert set(ORACLE_GATED) == GATED


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_value_is_the_definition(variant):
    h = torch.randn(17, 10, dtype=torch.float64)
    torch.testing.assert_close(make(**variant)(h), activate(h, **variant), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_backward_is_the_derivative_of_the_definition(variant):
    h = torch.randn(17, 10, dtype=torch.float64, requires_grad=True)
    value = activate(h, **variant)
    grad = torch.randn_like(value)
    (expected,) = torch.autograd.grad(value, h, grad)
    torch.testing.assert_close(make(**variant).backward(grad, h.detach()), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keeps_the_dtype_and_the_shape(variant, dtype):
    act = make(**variant)
    h = torch.randn(5, 12).to(dtype)
    a = act(h)
    grad = act.backward(torch.ones_like(a), h)
    assert a.dtype is grad.dtype is dtype
    assert a.shape == (5, 6 if act.gated else 12)
    assert grad.shape == h.shape


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_into_a_buffer_is_the_same(variant):
    act, h = make(**variant), torch.randn(5, 12)
    want = act(h)
    out = torch.full_like(want, float("nan"))
    assert act.into(h, out) is out
    torch.testing.assert_close(out, want)
    grad, out = torch.randn_like(want), torch.full_like(h, float("nan"))
    assert act.backward(grad, h, out) is out
    torch.testing.assert_close(out, act.backward(grad, h))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_does_not_write_to_its_arguments(variant):
    act = make(**variant)
    h = torch.randn(5, 12)
    grad = torch.randn_like(act(h))
    before = h.clone(), grad.clone()
    act(h)
    act.backward(grad, h)
    assert torch.equal(h, before[0])
    assert torch.equal(grad, before[1])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_takes_no_rows(variant):
    act = make(**variant)
    a = act(torch.empty(0, 12))
    assert act.backward(a, torch.empty(0, 12)).shape == (0, 12)


@pytest.mark.parametrize("name", ["relu", "relu2", "reglu"])
def test_backward_at_the_kink_is_that_of_torch(name):
    h = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    functions = {
        "relu": torch.relu,
        "relu2": lambda h: torch.relu(h) ** 2,
        "reglu": lambda h: torch.relu(h[:, :1]) * h[:, 1:],
    }
    value = functions[name](h)
    grad = torch.ones_like(value)
    (expected,) = torch.autograd.grad(value, h, grad)
    assert torch.equal(Activation(name).backward(grad, h.detach()), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_at_the_limit_is_that_of_clamp(interleaved):
    act = Activation("swiglu", 1.702, 1.0, 0.75, interleaved)
    edge = torch.tensor([-0.75, 0.75, 0.5, -2.0, 2.0], dtype=torch.float64)
    gate, up = (axis.flatten() for axis in torch.meshgrid(edge, edge, indexing="ij"))
    h = torch.stack((gate, up), -1).flatten() if interleaved else torch.cat((gate, up))
    h = h.unsqueeze(0).requires_grad_()
    value = activate(h, "swiglu", alpha=1.702, beta=1.0, limit=0.75, interleaved=interleaved)
    grad = torch.randn_like(value)
    (expected,) = torch.autograd.grad(value, h, grad)
    torch.testing.assert_close(act.backward(grad, h.detach()), expected, rtol=1e-13, atol=1e-13)


def test_split_gives_views():
    h = torch.arange(8.0).unsqueeze(0)
    gate, up = Activation("swiglu").split(h)
    assert gate.tolist() == [[0, 1, 2, 3]]
    assert up.tolist() == [[4, 5, 6, 7]]
    gate, up = Activation("swiglu", interleaved=True).split(h)
    assert gate.tolist() == [[0, 2, 4, 6]]
    assert up.tolist() == [[1, 3, 5, 7]]
    gate.zero_()
    assert h.tolist() == [[0, 1, 0, 3, 0, 5, 0, 7]]


def test_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown activation 'swigul': did you mean 'swiglu'"):
        Activation("swigul")


@pytest.mark.parametrize("name", ["geglu", "reglu", "silu", "relu2"])
@pytest.mark.parametrize(("parameter", "value"), [("alpha", 1.702), ("beta", 1.0), ("limit", 7.0)])
def test_parameters_of_swiglu_are_its_own(name, parameter, value):
    with pytest.raises(InputError, match=rf"activation '{name}' takes no alpha, beta or limit .*; got .*{value}"):
        Activation(name, **{parameter: value})


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_nothing_to_interleave(name):
    with pytest.raises(InputError, match=rf"activation '{name}' .*interleaved must be False .*; got interleaved=True"):
        Activation(name, interleaved=True)


def test_equal_activations_are_one_key():
    assert len({Activation("swiglu", 1.0), Activation("swiglu"), Activation("swiglu", limit=7.0)}) == 2
