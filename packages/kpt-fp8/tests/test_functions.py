import pytest
import torch

import kpt_fp8
from kpt_core import InputError, UnknownNameError
from kpt_fp8 import compute_fp8_scale, dequantize_from_fp8, quantize_to_fp8, scale_shape
from kpt_fp8.formats import FP8_DTYPES

GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32", "mxfp8")


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(150, 200) * torch.logspace(-4, 4, 150)[:, None]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_the_scale_is_what_is_divided_by(x, dtype, granularity, power_of_two):
    scale = compute_fp8_scale(x, dtype, granularity, power_of_two)
    own = quantize_to_fp8(x, dtype, granularity, power_of_two=power_of_two)
    assert scale.dtype is own.scale.dtype
    assert torch.equal(bits(scale), bits(own.scale))
    given = quantize_to_fp8(x, dtype, granularity, scale)
    assert torch.equal(bits(own.codes), bits(given.codes))
    if power_of_two or granularity == "mxfp8":
        assert (torch.frexp(scale.float()).mantissa == 0.5).all()


def test_mxfp8_is_1x32_with_exponents_for_scales(x):
    tensor = quantize_to_fp8(x, granularity="mxfp8")
    codes, scale = kpt_fp8.quantize(x, granularity="1x32", scale_dtype=torch.float8_e8m0fnu, scale_rounding="up")
    assert tensor.granularity == "1x32"
    assert tensor.scale.dtype is torch.float8_e8m0fnu
    assert torch.equal(bits(tensor.codes), bits(codes))
    assert torch.equal(bits(tensor.scale), bits(scale))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_and_back(x, granularity):
    tensor = quantize_to_fp8(x.bfloat16(), granularity=granularity)
    numbers = dequantize_from_fp8(tensor)
    assert numbers.dtype is torch.bfloat16
    wide = dequantize_from_fp8(tensor, dtype=torch.float32)
    assert torch.equal(wide, dequantize_from_fp8(tensor.codes, tensor.scale, granularity))
    assert torch.equal(wide.bfloat16(), numbers)
    block = wide if granularity not in ("tensor", "128x128") else wide[-1:]
    error = (block - x[-block.shape[0] :]).norm() / block.norm()
    assert 0.01 < error < 0.05


def test_rows_are_the_default_of_plain_codes():
    tensor = quantize_to_fp8(torch.tensor([[1.0, 2.0], [30.0, 40.0]]))
    assert tensor.scale.shape == (2,)
    assert torch.equal(dequantize_from_fp8(tensor.codes, tensor.scale), tensor.dequantize())


def test_stochastic_rounding_has_the_right_mean_and_follows_its_seed():
    x = torch.full((20000,), 1.03125)
    scale = torch.ones(())
    one, same, other = (
        quantize_to_fp8(x, granularity="tensor", scale=scale, stochastic=True, seed=seed).dequantize()
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.unique().tolist() == [1.0, 1.125]
    assert float(one.mean()) == pytest.approx(1.03125, abs=0.002)


def test_zeros_and_nothing():
    assert compute_fp8_scale(torch.zeros(2, 4)).tolist() == [1.0, 1.0]
    assert quantize_to_fp8(torch.empty(0, 4)).dequantize().shape == (0, 4)


def test_no_gradient():
    x = torch.randn(2, 4, requires_grad=True)
    assert not compute_fp8_scale(x).requires_grad
    assert not quantize_to_fp8(x).dequantize().requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: compute_fp8_scale(torch.ones(2, dtype=torch.int32)),
            InputError,
            r"x must be float64.*got torch.int32",
        ),
        (lambda: compute_fp8_scale(torch.ones(2), torch.int8), InputError, "dtype must be float8_e4m3fn.*got"),
        (lambda: compute_fp8_scale(torch.ones(2), granularity="rows"), UnknownNameError, "did you mean 'row'"),
        (lambda: compute_fp8_scale(torch.ones(2), granularity="mx"), UnknownNameError, "mxfp8"),
        (lambda: scale_shape([2, 32], "mx"), UnknownNameError, "mxfp8"),
        (lambda: compute_fp8_scale(torch.ones(2), granularity="128x128"), InputError, "2 dimensions at least"),
        (lambda: quantize_to_fp8(torch.ones(2), granularity="rows"), UnknownNameError, "did you mean 'row'"),
        (
            lambda: quantize_to_fp8(torch.ones(2), scale=torch.ones(()), power_of_two=True),
            InputError,
            "got a scale too: leave one of them out",
        ),
        (lambda: quantize_to_fp8(torch.ones(3, 2), scale=torch.ones(2)), InputError, r"scale must be .* shape \[3\]"),
        (lambda: quantize_to_fp8([1.0, 2.0]), InputError, "x must be a tensor; got list: call torch.tensor on it"),
        (lambda: compute_fp8_scale(3.0), InputError, "compute_fp8_scale: x must be a tensor; got float"),
        (lambda: dequantize_from_fp8([1.0]), InputError, "codes must be a tensor; got list"),
        (
            lambda: quantize_to_fp8(quantize_to_fp8(torch.ones(2))),
            InputError,
            r"got FP8Tensor \(already quantised\): call \.dequantize\(\) on it first",
        ),
        (
            lambda: quantize_to_fp8(torch.ones(2, 32), granularity="mxfp8", scale=torch.ones(2, 1)),
            InputError,
            "scales of mxfp8 are powers of two of float8_e8m0fnu; got torch.float32: give granularity='1x32'",
        ),
        (
            lambda: dequantize_from_fp8(torch.ones(2, 32).to(torch.float8_e5m2), torch.ones(2, 1), "mxfp8"),
            InputError,
            "scales of mxfp8 are powers of two of float8_e8m0fnu; got torch.float32",
        ),
        (
            lambda: dequantize_from_fp8(torch.ones(2).to(torch.float8_e5m2)),
            InputError,
            "plain codes need their scale; got none",
        ),
        (
            lambda: dequantize_from_fp8(quantize_to_fp8(torch.ones(2)), torch.ones(())),
            InputError,
            "has its own scale and granularity",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
