"""`fp8.linear` as GPUs compute it: its numbers on a CPU, by the same products, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_core import Call
from kpt_fp8.cases.linear import LINEAR
from kpt_fp8.linear import linear
from kpt_fp8.torch_kernels import gpu_linear
from kpt_optimize.cases import Case

BLOCKS = ("1x128", "128x128", "1x32")


def call_of(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Call:
    usual = {"rows": 9, "inner": 160, "columns": 136, "biased": True}
    return linear.bind(**LINEAR.arguments(Case(name="", sizes={**usual, **sizes}), dtype=dtype))


def errors(found: Tensor, call: Call, want: Tensor) -> tuple[float, float]:
    """Mean error of a result, and of the float64 truth rounded once."""
    rounded = want.to(call.x.dtype).double()
    return (found.double() - want).abs().mean().item(), (rounded - want).abs().mean().item()


def truth_of(call: Call) -> Call:
    wide = {name: getattr(call, name).double() for name in ("x", "bias")}
    return call._replace(**wide)


@pytest.mark.parametrize("granularity", ["row", "tensor", *BLOCKS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_and_its_gradients_are_rounded_once(granularity: str, dtype: torch.dtype) -> None:
    call = call_of(dtype, granularity=granularity)
    if granularity in BLOCKS and dtype is torch.float16:
        assert "needs bfloat16" in str(gpu_linear.unsupported(call))
        return
    assert gpu_linear.unsupported(call) is None
    truth = truth_of(call)
    x = truth.x.clone().requires_grad_()
    want = linear.run_reference(truth._replace(x=x))
    error, least = errors(gpu_linear.forward(call), call, want.detach())
    assert error <= 1.02 * least
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    want.backward(grad.double())
    made = gpu_linear.backward(call._replace(needs=("x", "bias")), (), grad)
    assert x.grad is not None
    for found, expected in ((made["x"], x.grad), (made["bias"], grad.double().sum(0))):
        error, least = errors(found, call, expected)
        assert error <= 1.02 * least


@pytest.mark.parametrize("granularity", ["row", "tensor", *BLOCKS])
def test_float32_is_as_exact_as_the_reference(granularity: str) -> None:
    call = call_of(torch.float32, granularity=granularity)
    assert gpu_linear.unsupported(call) is None
    truth = truth_of(call)
    want = linear.run_reference(truth)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    made = gpu_linear.backward(call._replace(needs=("x", "bias")), (), grad)
    x = truth.x.clone().requires_grad_()
    linear.run_reference(truth._replace(x=x)).backward(grad.double())
    assert x.grad is not None
    reference = linear.run_reference(call)
    assert errors(gpu_linear.forward(call), call, want)[0] <= 1.3 * errors(reference, call, want)[0]
    torch.testing.assert_close(made["x"].double(), x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made["bias"].double(), grad.double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("static", [False, True])
def test_quantised_activations_are_multiplied_as_8_bit_numbers(granularity: str, static: bool) -> None:
    call = call_of(granularity=granularity, activations=granularity, static=static)
    assert gpu_linear.unsupported(call) is None
    want = linear.run_reference(call).double()
    torch.testing.assert_close(gpu_linear.forward(call).double(), want, rtol=2**-7, atol=2**-9)
    infinite = call._replace(x=call.x.index_fill(0, torch.tensor([2]), torch.inf))
    assert gpu_linear.forward(infinite).isnan().any(1).tolist() == [row == 2 for row in range(9)]


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"dtype": torch.float64}, "x in float64; this kernel multiplies 16-bit numbers and float32"),
        ({"rows": 0}, "nothing to compute"),
        ({"activations": "1x128", "granularity": "1x128"}, "activations by 1x128 and a weight by 1x128"),
        ({"activations": "row", "granularity": "tensor"}, "activations by row and a weight by tensor"),
    ],
)
def test_it_says_what_it_does_not_take(given: dict[str, Any], refused: str) -> None:
    assert refused in str(gpu_linear.unsupported(call_of(**given)))
