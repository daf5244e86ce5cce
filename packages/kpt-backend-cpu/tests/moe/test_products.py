"""`moe.grouped_mm`, its weights' gradient and `moe.scaled_grouped_mm` against float64, and what they refuse."""

from itertools import pairwise

import pytest
import torch

import kpt_core
from kpt_core import InputError

ENDS = [4, 4, 11, 30]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64; rows past the last end are zero."""
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=torch.float64)
    for expert, (start, end) in enumerate(pairwise([0, *ENDS])):
        out[start:end] = x[start:end].double() @ weight[expert].double()
    return out


def arguments(dtype: torch.dtype = torch.float32, inner: int = 37, columns: int = 29) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(inner)
    x, weight = torch.randn(33, inner, generator=generator), torch.randn(4, inner, columns, generator=generator)
    x[30:] = torch.nan
    return x.to(dtype), weight.to(dtype), torch.tensor(ENDS, dtype=torch.int32)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert ((got.double() - want).abs().max() / want.abs().max()).item() <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["KN", "NK", "neither"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_and_its_gradients_are_right(dtype, layout, trained):
    x, weight, offsets = arguments(dtype)
    if layout == "NK":
        weight = weight.mT.contiguous().mT
    if layout == "neither":
        weight = torch.stack((weight, weight + torch.nan), -1)[..., 0]
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = trained["grouped_mm"](x, weight, offsets)
    assert out.dtype is dtype
    assert_near(out, product(x, weight), dtype)
    pull = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), pull)
    assert_near(grad_x, product(pull, weight.mT), dtype)
    wanted = [x[a:b].double().t() @ pull[a:b].double() for a, b in pairwise([0, *ENDS])]
    assert_near(grad_weight, torch.stack(wanted).detach(), dtype)
    if layout == "NK":
        assert grad_weight.stride() == weight.stride()


def test_gradients_of_gradients_are_right(trained):
    x, weight, offsets = arguments()
    x = x[:30]
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    doubles = [t.double().requires_grad_() for t in (x, weight)]
    results = []
    for one, other, function in (
        (*leaves, lambda a, b: trained["grouped_mm"](a, b, offsets)),
        (*doubles, lambda a, b: torch.cat([a[s:e] @ w for w, (s, e) in zip(b, pairwise([0, *ENDS]), strict=True)])),
    ):
        grads = torch.autograd.grad(function(one, other).square().sum(), (one, other), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (one, other)))
    for got, want in zip(*results, strict=True):
        assert_near(got, want, torch.float32)


@pytest.mark.parametrize("ends", [[4, 3, 11, 30], [4, 4, 11, 34], [-1, 4, 11, 30]], ids=["falling", "past", "negative"])
def test_offsets_that_would_read_what_is_not_there_are_refused(ends, kernels):
    x, weight, _ = arguments()
    wrong = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(InputError, match=r"moe.grouped_mm: offsets must be non-decreasing end rows between 0 and 33"):
        kernels["grouped_mm"](x, weight, wrong)
    with pytest.raises(InputError, match=r"moe.grouped_mm_wgrad: offsets must be"):
        kernels["grouped_mm_wgrad"](x, x, wrong)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 5, 4), (6, 0, 4), (6, 5, 0)])
def test_empty_products_are_zero(rows, inner, columns, kernels):
    offsets = torch.tensor([rows // 2, rows], dtype=torch.int32)
    x, weight = torch.randn(rows, inner), torch.randn(2, inner, columns)
    assert torch.equal(kernels["grouped_mm"](x, weight, offsets), torch.zeros(rows, columns))
    grad = torch.randn(rows, columns)
    wanted = torch.stack([x[: rows // 2].t() @ grad[: rows // 2], x[rows // 2 :].t() @ grad[rows // 2 :]])
    torch.testing.assert_close(kernels["grouped_mm_wgrad"](x, grad, offsets), wanted)


SCALES = {"columns": (1, 200), "rows": (150, 1), "blocks": (2, 2)}


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_a_scaled_product_is_of_the_dequantised_numbers(scales, x_dtype, out_dtype, trained):
    x, weight, offsets = arguments(inner=150, columns=200)
    x, codes = x.to(x_dtype), (weight * 16).to(torch.float8_e4m3fn)
    scale = torch.rand(4, *SCALES[scales], dtype=torch.float64) + 0.5
    wide = scale.float().double()
    if scales == "blocks":
        wide = wide.repeat_interleave(128, 1)[:, :150].repeat_interleave(128, 2)[..., :200]
    x_scale = torch.rand(33, 2) + 0.5 if x_dtype.itemsize == 1 else None
    wide_x = x.double() if x_scale is None else x.double() * x_scale.double().repeat_interleave(128, 1)[:, :150]
    given = scale.squeeze(1) if scales == "columns" else scale
    got = trained["scaled_grouped_mm"](x, codes, given, offsets, x_scale=x_scale, out_dtype=out_dtype)
    assert got.dtype is (out_dtype or (torch.bfloat16 if x_dtype.itemsize == 1 else x_dtype))
    assert_near(got, product(wide_x, codes.double() * wide), got.dtype)
    if x_scale is None:
        leaf = x.clone().requires_grad_()
        out = trained["scaled_grouped_mm"](leaf, codes, given, offsets, out_dtype=out_dtype)
        pull = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
        (grad,) = torch.autograd.grad(out, leaf, pull)
        assert grad.dtype is x_dtype
        assert_near(grad, product(pull, (codes.double() * wide).mT), x_dtype)


def test_a_scaled_result_of_float64_is_refused_in_a_sentence(kernels):
    x, weight, offsets = arguments()
    scaled = kpt_core.ops()["moe.scaled_grouped_mm"]
    call = (x, weight.to(torch.float8_e5m2), torch.ones(4, 29), offsets)
    with kpt_core.use("cpu"), pytest.raises(kpt_core.NoKernelError, match="a result in float64; needs float32"):
        scaled(*call, out_dtype=torch.float64)


def test_products_compile_as_one_graph(kernels):
    x, weight, offsets = arguments()
    grouped_mm, grouped_mm_wgrad = (kpt_core.ops()[f"moe.{name}"] for name in ("grouped_mm", "grouped_mm_wgrad"))

    def both(x, weight, offsets):
        return grouped_mm_wgrad(x[:30], grouped_mm(x, weight, offsets)[:30], offsets)

    with torch.no_grad():
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, weight, offsets), both(x, weight, offsets))
