"""Values and gradients of `moe.experts` against the oracle."""

import pytest
import torch
from torch import Tensor

from kpt_core import record
from kpt_moe.experts import experts
from kpt_moe.torch_kernels import experts_loop
from oracle import ACTIVATIONS, CLAMPED, GATED, Inputs, gradients, make_inputs, naive_experts

pytestmark = pytest.mark.usefixtures("path")

KINDS = {
    **{name: {"activation": name} for name in ACTIVATIONS},
    **{f"{name}-interleaved": {"activation": name, "interleaved": True} for name in GATED},
    "clamped": CLAMPED,
    "clamped-interleaved": {**CLAMPED, "interleaved": True},
}
SIZES = {
    "no tokens": {"tokens": 0},
    "one token": {"tokens": 1},
    "63 tokens": {"tokens": 63},
    "one choice": {"top_k": 1},
    "every expert": {"top_k": 5},
    "one expert": {"num_experts": 1, "top_k": 1},
    "most experts idle": {"tokens": 3, "num_experts": 40},
    "many tokens": {"tokens": 300, "num_experts": 3},
    "size one": {"hidden": 1, "inner": 1},
}


def check(inputs: Inputs, **choices) -> None:
    """The op equals the oracle in value and in every gradient, and its gradients have the strides of their inputs."""
    grad = torch.randn(inputs.x.shape, dtype=inputs.x.dtype)
    want, want_grads = gradients(lambda inputs: naive_experts(inputs, **choices), inputs, grad)
    have, have_grads = gradients(lambda inputs: experts(*inputs.args, **choices), inputs, grad)
    torch.testing.assert_close(have, want)
    for a, b in zip(have_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["default", "transposed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout(kind, transposed, bias):
    choices = {**KINDS[kind], "transposed": transposed}
    activation = choices["activation"]
    check(make_inputs(activation=activation, transposed=transposed, bias=bias, sentinels=True), **choices)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_size(sizes, bias):
    check(make_inputs(**sizes, bias=bias))


ROUTINGS = {
    "all to the first": lambda index: torch.zeros_like(index),
    "all to the last": lambda index: torch.full_like(index, 4),
    "an expert twice": lambda index: torch.where(index > 2, 1, index),
    "none is here": lambda index: index + 5,
    "far beyond": lambda index: torch.where(index > 2, 2**40, index),
    "two tokens of no expert": lambda index: torch.where(torch.arange(11).unsqueeze(1) % 5 == 1, 5, index),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_every_routing(routing):
    inputs = make_inputs(bias=True)
    check(Inputs(inputs.x, routing(inputs.index), *inputs.args[2:]))


@pytest.mark.parametrize("path", ["loop"], indirect=True)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 20])
def test_blocks_of_rows_do_not_show(block, training, monkeypatch):
    # The loop works on blocks of rows, larger than all other tests need.
    monkeypatch.setattr(experts_loop, "_BLOCK", block)
    inputs = make_inputs(tokens=30, num_experts=6, bias=True, sentinels=True)
    if training:
        check(inputs)
    else:
        torch.testing.assert_close(experts(*inputs.args), naive_experts(inputs))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_of_an_expert(rows, transposed):
    # Small products take other ways in float32.
    inputs = make_inputs(tokens=rows, top_k=1, num_experts=2, hidden=24, inner=16, transposed=transposed)
    inputs = Inputs(inputs.x, torch.zeros_like(inputs.index), *inputs.args[2:])
    want = naive_experts(inputs, transposed=transposed)
    have = experts(*inputs.to(torch.float32).args, transposed=transposed)
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)


def test_int32_ids():
    inputs = make_inputs(sentinels=True)
    check(Inputs(inputs.x, inputs.index.int(), *inputs.args[2:]))


@pytest.mark.parametrize("path", ["loop", "grouped"], indirect=True)
def test_default_memory_order_of_gradients():
    # A gradient in another memory order than its parameter costs autograd a copy of all experts.
    for transposed in (False, True):
        inputs = make_inputs(transposed=transposed).leaves()
        out = experts(*inputs.args, transposed=transposed)
        for leaf, grad in zip(inputs.floats, torch.autograd.grad(out.sum(), inputs.floats), strict=True):
            assert grad.stride() == leaf.stride()


STRIDED = {
    "x by columns": lambda i: Inputs(i.x.t().contiguous().t(), *i.args[1:]),
    "x with gaps": lambda i: Inputs(i.x.repeat_interleave(2, 0)[::2], *i.args[1:]),
    "x expanded": lambda i: Inputs(i.x[:1].expand_as(i.x), *i.args[1:]),
    "index by columns": lambda i: Inputs(i.x, i.index.t().contiguous().t(), *i.args[2:]),
    "index expanded": lambda i: Inputs(i.x, i.index[:1].expand_as(i.index), *i.args[2:]),
    "weights by columns": lambda i: Inputs(*i.args[:2], i.weights.t().contiguous().t(), *i.args[3:]),
    "weights expanded": lambda i: Inputs(*i.args[:2], i.weights[:, :1].expand_as(i.weights), *i.args[3:]),
    "matrices the other way": lambda i: Inputs(
        *i.args[:3], i.up.mT.contiguous().mT, i.down.mT.contiguous().mT, *i.args[5:]
    ),
    "one matrix for all experts": lambda i: Inputs(
        *i.args[:3], i.up[:1].expand_as(i.up), i.down[:1].expand_as(i.down), *i.args[5:]
    ),
    "every second expert of a larger tensor": lambda i: Inputs(
        *i.args[:3], i.up.repeat_interleave(2, 0)[::2], i.down.repeat_interleave(2, 0)[::2], *i.args[5:]
    ),
    "biases expanded": lambda i: Inputs(
        *i.args[:5], i.up_bias[:1].expand_as(i.up_bias), i.down_bias[:, :1].expand(5, 8)
    ),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_any_strides(strided, transposed):
    dense = make_inputs(bias=True, transposed=transposed).leaves()
    inputs = strided(dense)
    out = experts(*inputs.args, transposed=transposed)
    want = naive_experts(inputs, transposed=transposed)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    have_grads, want_grads = (torch.autograd.grad(value, dense.floats, grad) for value in (out, want))
    torch.testing.assert_close(have_grads, want_grads)


GRADS = {
    "of a sum": lambda out: out.sum(),
    "of one row": lambda out: out[3].sum(),
    "by columns": lambda out: (out.t() * torch.arange(1.0, 9.0).unsqueeze(1)).sum(),
}


@pytest.mark.parametrize("reduce", GRADS.values(), ids=GRADS)
def test_any_strides_of_the_output_gradient(reduce):
    inputs = make_inputs(bias=True, sentinels=True).leaves()
    have = torch.autograd.grad(reduce(experts(*inputs.args)), inputs.floats)
    want = torch.autograd.grad(reduce(naive_experts(inputs)), inputs.floats)
    torch.testing.assert_close(have, want)


def contaminated(poison: float) -> tuple[Inputs, Inputs, Tensor, Tensor]:
    """Inputs and output gradient with `poison` wherever no expert looks, and the same with zeros."""
    clean = make_inputs(tokens=12, bias=True)
    away = torch.zeros(12, 3, dtype=torch.bool)
    away[2], away[7], away[9, 1] = True, True, True
    index = torch.where(away, 5, clean.index)
    nowhere = away.all(1, keepdim=True)
    grad = torch.randn_like(clean.x)

    def fill(value: float) -> tuple[Inputs, Tensor]:
        x, weights = clean.x.masked_fill(nowhere, value), clean.weights.masked_fill(away, value)
        return Inputs(x, index, weights, *clean.args[3:]), grad.masked_fill(nowhere, value)

    (bad, bad_grad), (good, good_grad) = fill(poison), fill(0.0)
    return bad, good, bad_grad, good_grad


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_no_expert_owns_does_not_leak(poison, transposed):
    bad, good, bad_grad, good_grad = contaminated(poison)
    if transposed:
        bad, good = (Inputs(*i.args[:3], i.up.mT, i.down.mT, *i.args[5:]) for i in (bad, good))
    have, have_grads = gradients(lambda i: experts(*i.args, transposed=transposed), bad, bad_grad)
    want, want_grads = gradients(lambda i: naive_experts(i, transposed=transposed), good, good_grad)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(have_grads, want_grads)


def test_a_bad_token_spoils_itself_alone():
    inputs = make_inputs()
    want = experts(*inputs.args)
    inputs.x[4] = float("nan")
    have = experts(*inputs.args)
    assert have[4].isnan().all()
    assert torch.equal(have[torch.arange(11) != 4], want[torch.arange(11) != 4])


@pytest.mark.parametrize("wanted", range(6), ids=["x", "weights", "up", "down", "up_bias", "down_bias"])
def test_each_gradient_alone(wanted):
    inputs = make_inputs(bias=True, sentinels=True)
    tensor = inputs.floats[wanted].requires_grad_()
    have, want = (torch.autograd.grad(out.sum(), tensor) for out in (experts(*inputs.args), naive_experts(inputs)))
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("kind", ["silu", "geglu", "clamped-interleaved"])
def test_gradcheck(kind):
    choices = KINDS[kind]
    inputs = make_inputs(
        tokens=4, hidden=3, inner=2, num_experts=3, bias=True, sentinels=True, activation=choices["activation"]
    ).leaves()
    assert torch.autograd.gradcheck(lambda x, *rest: experts(x, inputs.index, *rest, **choices), inputs.floats)


@pytest.mark.parametrize("choices", [{}, {"activation": "gelu_tanh"}, {"activation": "silu", "transposed": True}])
def test_second_derivative(choices):
    sizes = {"tokens": 3, "hidden": 3, "inner": 2, "num_experts": 3, "sentinels": True}
    inputs = make_inputs(
        **sizes, bias=True, activation=choices.get("activation", "swiglu"), transposed=choices.get("transposed", False)
    ).leaves()
    assert torch.autograd.gradgradcheck(
        lambda x, *rest: experts(x, inputs.index, *rest, **choices), inputs.floats, fast_mode=True
    )


@pytest.mark.parametrize("wanted", range(4))
def test_a_penalty_on_a_gradient_trains(wanted):
    # With a constant output gradient (of a sum), a second derivative that is left out would not be noticed.
    inputs = make_inputs().leaves()
    penalties = []
    for function in (lambda i: experts(*i.args), naive_experts):
        (grad,) = torch.autograd.grad(function(inputs).sum(), inputs.floats[wanted], create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), inputs.floats, allow_unused=True))
    for have, want, leaf in zip(*penalties, inputs.floats, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if have is None else have, zero if want is None else want)


@pytest.mark.parametrize("training", [False, True])
def test_inputs_are_not_modified(training):
    inputs = make_inputs(bias=True, sentinels=True)
    inputs = inputs.leaves() if training else inputs
    tensors = [tensor for tensor in inputs.args if tensor is not None]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    out = experts(*inputs.args)
    if training:
        out.sum().backward()
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor.detach(), value)


def test_record_tells_what_ran(path):
    inputs = make_inputs()
    with record() as log:
        experts(*inputs.args)
    children = ["moe.grouped_mm"] * 2 if path == "grouped" else []
    assert [(s.op, [child.op for child in s.children]) for s in log] == [("moe.experts", children)]
    assert path in log[0].kernel


@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_is_the_declared_one_where_shapes_fit_both(transposed):
    # 2 * 16 = 32: gate_up_proj is square, so nothing but the flag tells what its rows are.
    inputs = make_inputs(hidden=32, inner=16, transposed=transposed)
    assert inputs.up.shape[1:] == (32, 32)
    check(inputs, transposed=transposed)
    other = Inputs(*inputs.args[:3], inputs.up.mT, inputs.down.mT, *inputs.args[5:])
    want = naive_experts(inputs, transposed=transposed)
    torch.testing.assert_close(experts(*other.args, transposed=not transposed), want)
