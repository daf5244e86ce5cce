"""How `moe.experts` rounds, and what dtypes it takes and gives."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe.experts import experts
from kpt_moe.torch_kernels import experts_loop
from oracle import CLAMPED, Inputs, gradients, make_inputs, naive_experts

pytestmark = pytest.mark.usefixtures("path")

TOKENS, HIDDEN, INNER = 60, 64, 48
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounded(dtype: torch.dtype, top_k: int = 3, **choices) -> Inputs:
    """Inputs in `dtype`, so that the float64 oracle starts from the very same numbers."""
    return make_inputs(
        tokens=TOKENS, hidden=HIDDEN, inner=INNER, top_k=top_k, num_experts=8, dtype=dtype, bias=True, **choices
    )


def exact(inputs: Inputs, grad: Tensor, **choices) -> tuple[Tensor, list[Tensor]]:
    return gradients(lambda i: naive_experts(i, **choices), inputs.to(torch.float64), grad.double())


def worst_case(inputs: Inputs) -> Tensor:
    """A bound on the first-order error of swiglu experts, in units of one rounding.

    Let `g` and `u` be the products with all signs positive. The pre-activation is off by at most `r` roundings of `g`
    and `u`, and since |silu| <= |gate| and |silu'| < 1.1, the activation by at most `(2.1 r + 3) g u`; `r` more come
    from the down product, and three from bias, routing weight and result.
    """
    positive = inputs.to(torch.float64).map(torch.abs)
    return naive_experts(positive, activation=lambda h: h[: h.shape[-1] // 2] * h[h.shape[-1] // 2 :])


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_the_worst_case(dtype, top_k):
    inputs = rounded(dtype, top_k)
    out = experts(*inputs.args)
    error = (out.double() - naive_experts(inputs.to(torch.float64))).abs()
    # Two bytes: products are accumulated in float32 and rounded once, r = 2 with the bias. Four bytes: r is the number
    # of terms. The sum over choices is in float32 in either case.
    r = HIDDEN + 1 if dtype is torch.float32 else 2
    roundings = 2.1 * r + 3 + r + 3 + (top_k if dtype is torch.float32 else 0)
    assert (error <= roundings * torch.finfo(dtype).eps / 2 * worst_case(inputs)).all()


#: Smooth activations: where a gradient jumps (at a limit, at a kink), rounding the pre-activation moves numbers over.
SMOOTH = {"swiglu": {"activation": "swiglu"}, "gelu": {"activation": "gelu"}, "unclamped": {**CLAMPED, "limit": 7.0}}


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("kind", SMOOTH.values(), ids=SMOOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_of_the_size_of_one_rounding(dtype, kind, top_k):
    # One rounding has a relative deviation of about 0.4 in units of eps / 2. A result has passed through at most ten
    # that are independent, whatever the number of choices, which makes 0.4 sqrt(10) = 1.3; in float32 the accumulation
    # of some 64 terms comes on top, whose error grows like a random walk.
    inputs = rounded(dtype, top_k, activation=kind["activation"])
    grad = torch.randn(TOKENS, HIDDEN).to(dtype)
    have, have_grads = gradients(lambda i: experts(*i.args, **kind), inputs, grad)
    want, want_grads = exact(inputs, grad, **kind)
    unit = torch.finfo(dtype).eps / 2
    names = ("out", "x", "weights", "up", "down", "up_bias", "down_bias")
    errors = {
        name: ((a.double() - b).norm() / b.norm() / unit).item()
        for name, a, b in zip(names, (have, *have_grads), (want, *want_grads), strict=True)
    }
    assert max(errors.values()) < (2 + 0.5 * 64**0.5 if dtype is torch.float32 else 2), errors


@pytest.mark.parametrize("weights_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_result_has_the_dtype_of_x_and_gradients_those_of_their_inputs(dtype, weights_dtype):
    inputs = make_inputs(bias=True, sentinels=True, dtype=dtype)
    inputs = Inputs(*inputs.args[:2], inputs.weights.to(weights_dtype), *inputs.args[3:]).leaves()
    out = experts(*inputs.args)
    assert out.dtype is dtype
    assert out.device == inputs.x.device
    grads = torch.autograd.grad(out.sum(), inputs.floats)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in inputs.floats]
    torch.testing.assert_close(out.double(), naive_experts(inputs.to(torch.float64)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_choices_are_summed_in_float32(weights_dtype, monkeypatch):
    # One expert gives 256 and 64 give 1 each: a bfloat16 accumulator would stay at 256, where its steps are of 2.
    monkeypatch.setattr(experts_loop, "_BLOCK", 1)
    inputs = Inputs(
        x=torch.ones(1, 1, dtype=torch.bfloat16),
        index=torch.arange(65).unsqueeze(0),
        weights=torch.ones(1, 65, dtype=weights_dtype),
        up=torch.ones(65, 1, 1, dtype=torch.bfloat16),
        down=torch.tensor([256] + [1] * 64, dtype=torch.bfloat16).view(65, 1, 1),
    )
    assert experts(*inputs.args, activation="relu").item() == 320


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["loop", "grouped"], indirect=True)
def test_kernels_are_as_good_as_the_reference(dtype, weights_dtype, top_k):
    inputs = rounded(dtype, top_k)
    inputs = replace(inputs, weights=inputs.weights.to(weights_dtype))
    grad = torch.randn(TOKENS, HIDDEN).to(dtype)
    want, want_grads = exact(inputs, grad)

    def errors(function) -> list[float]:
        have, grads = gradients(lambda i: function(*i.args), inputs, grad)
        pairs = zip((have, *grads), (want, *want_grads), strict=True)
        return [(a.double() - b).abs().mean().item() for a, b in pairs]

    pairs = list(zip(errors(experts), errors(experts.reference), strict=True))
    assert all(kernel <= 1.1 * reference for kernel, reference in pairs), pairs


def test_mixed_precision_of_experts_is_refused():
    inputs = make_inputs(dtype=torch.float32)
    with pytest.raises(InputError, match="gate_up_proj must have x's dtype"):
        experts(*Inputs(inputs.x.bfloat16(), *inputs.args[1:]).args)


class TestAutocast:
    """As with torch's own products: operands are converted, results are low, parameters keep float32 gradients."""

    def test_equals_converting_by_hand(self):
        inputs = make_inputs(bias=True, dtype=torch.float32).leaves()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = experts(*inputs.args)
        assert out.dtype is torch.bfloat16
        low = inputs.to(torch.bfloat16)
        assert torch.equal(out, experts(low.x, low.index, inputs.weights, *low.args[3:]))
        grads = torch.autograd.grad(out.float().sum(), inputs.floats)
        assert {g.dtype for g in grads} == {torch.float32}
        low = low.leaves()
        weights = inputs.weights.detach().clone().requires_grad_()
        by_hand = experts(low.x, low.index, weights, *low.args[3:])
        want = torch.autograd.grad(by_hand.float().sum(), [low.x, weights, *low.floats[2:]])
        assert all(torch.equal(a, b.float()) for a, b in zip(grads, want, strict=True))

    def test_takes_low_activations_and_float32_parameters(self):
        inputs = make_inputs(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = experts(inputs.x.bfloat16(), *inputs.args[1:])
            assert torch.equal(mixed, experts(*inputs.args))

    def test_float16(self):
        inputs = make_inputs(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.float16):
            assert experts(*inputs.args).dtype is torch.float16

    def test_float64_is_left_alone(self):
        inputs = make_inputs()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(experts(*inputs.args), experts(*inputs.args))
            assert experts(*inputs.args).dtype is torch.float64

    def test_may_be_switched_off_inside(self):
        inputs = make_inputs(dtype=torch.float32)
        want = experts(*inputs.args)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert torch.equal(experts(*inputs.args), want)

    def test_goes_on_afterwards(self):
        inputs = make_inputs(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            experts(*inputs.args)
            assert torch.is_autocast_enabled("cpu")
            assert torch.mm(inputs.x, inputs.x.t()).dtype is torch.bfloat16
