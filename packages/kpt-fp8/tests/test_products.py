"""`fp8.scaled_mm` and `fp8.linear`: against torch's own, where it has one."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from kpt_core import InputError, use
from kpt_fp8 import dequantize, linear, quantize, scale_shape, scaled_mm
from kpt_fp8.scales import BLOCKS


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scaled_mm_is_torchs(granularity: str) -> None:
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    (a, scale_a), (b, scale_b) = quantize(x, granularity=granularity), quantize(w, granularity=granularity)
    got = scaled_mm(
        a, b.t(), scale_a, scale_b, granularity_a=granularity, granularity_b=granularity, out_dtype=torch.float32
    )
    shape = ((-1, 1), (1, -1)) if granularity == "row" else ((), ())
    theirs = torch._scaled_mm(a, b.t(), scale_a.view(shape[0]), scale_b.view(shape[1]), out_dtype=torch.float32)
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-4)


def test_scales_of_b_are_transposed_as_b_is() -> None:
    x, w = torch.randn(9, 300), torch.randn(200, 300)
    (a, scale_a), (b, scale_b) = quantize(x, granularity="1x128"), quantize(w, granularity="128x128")
    assert scale_b.shape == (2, 3)
    got = scaled_mm(
        a, b.t(), scale_a, scale_b.t(), granularity_a="1x128", granularity_b="128x128", out_dtype=torch.float64
    )
    wide = {"dtype": torch.float64}
    expected = (
        dequantize(a, scale_a, granularity="1x128", **wide) @ dequantize(b, scale_b, granularity="128x128", **wide).t()
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match=r"scale_b.t\(\) must be float32.*\[2, 3\].*got torch.float32 \[3, 2\]"):
        scaled_mm(a, b.t(), scale_a, scale_b, granularity_a="1x128", granularity_b="128x128")


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128", "1x32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_that_of_the_dequantised_weight(granularity: str, dtype: torch.dtype) -> None:
    w, bias = torch.randn(1500, 300), torch.randn(1500).to(dtype).requires_grad_()
    codes, scale = quantize(w, granularity=granularity)
    x = torch.randn(7, 300).to(dtype).requires_grad_()
    out = linear(x, codes, scale, bias, granularity=granularity)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (x, bias), grad)
    dense = dequantize(codes, scale, granularity=granularity)
    wide = [t.detach().float().requires_grad_() for t in (x, bias)]
    expected = F.linear(wide[0], dense, wide[1])
    right = torch.autograd.grad(expected, wide, grad.float())
    tolerance = {"rtol": 1e-5, "atol": 2e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-1}
    torch.testing.assert_close(out.float(), expected, **tolerance)
    for got, want in zip(gradients, right, strict=True):
        torch.testing.assert_close(got.float(), want, **tolerance)


def test_activations_are_quantised_as_quantize_does() -> None:
    w, x = torch.randn(40, 64), torch.randn(5, 64, requires_grad=True)
    codes, scale = quantize(w, granularity="row")
    rows, own = quantize(x.detach(), granularity="row")
    expected = scaled_mm(rows, codes.t(), own, scale, out_dtype=torch.float32)
    got = linear(x, codes, scale, activations="row")
    torch.testing.assert_close(got, expected)
    static = linear(x, codes, scale, None, torch.tensor(0.01), activations="tensor")
    assert not torch.equal(static, got)
    got.sum().backward()
    torch.testing.assert_close(x.grad, dequantize(codes, scale, granularity="row").sum(0).expand(5, 64))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_products_are_right_up_to_where_their_sums_overflow(backend: str) -> None:
    """The sum of codes may be scaled afterwards: it is promised as long as it is finite itself."""
    weight = torch.full((2, 64), 448.0).to(torch.float8_e4m3fn)
    scale = torch.full((2,), 2.0**-20)
    rows = torch.full((1, 64), 2.0**112)
    codes = torch.full((1, 64), 256.0).to(torch.float8_e4m3fn)
    expected = torch.full((1, 2), 64 * 448 * 2.0**92)
    with use(backend):
        assert torch.equal(linear(rows, weight, scale), expected)
        own = torch.full((1,), 2.0**104)
        assert torch.equal(scaled_mm(codes, weight.t(), own, scale, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128", "1x32"])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (3, 130, 256)])
def test_each_number_meets_its_own_scale(granularity: str, shape: tuple[int, ...]) -> None:
    """By a loop over blocks, in every layout."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape(shape, granularity), generator=generator) + 0.5
    height, width = (999 if size is None else size for size in BLOCKS[granularity])
    grid = scale[..., None] if granularity == "row" else scale.expand(1, 1) if granularity == "tensor" else scale
    expected = codes.float()
    for i, j in itertools.product(range(grid.shape[-2]), range(grid.shape[-1])):
        part = expected[..., i * height : (i + 1) * height, j * width : (j + 1) * width]
        part *= grid[..., i, j, None, None]
    for backend in ("reference", "torch"):
        for laid_out in (codes, codes.mT.contiguous().mT):
            with use(backend):
                assert torch.equal(dequantize(laid_out, scale, granularity=granularity), expected)


def test_memory_of_a_call_is_a_part_of_the_weight() -> None:
    """No copy of the weight in another dtype: 64 MiB it would be in float32."""
    codes, scale = torch.zeros(4096, 4096).to(torch.float8_e4m3fn), torch.ones(4096)
    x = torch.ones(1, 4096)
    linear(x, codes, scale)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear(x, codes, scale)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 8 << 20
