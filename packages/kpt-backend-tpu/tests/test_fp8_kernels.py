"""Quantising and products of 8-bit matrices by JAX on the CPU against the ops' references."""

import pytest
import torch

from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.fp8 import quantize as quantising
from kpt_backend_tpu.fp8 import scaled_mm as multiplying
from kpt_core.dispatch import force
from kpt_fp8.quantize import quantize
from kpt_fp8.scaled_mm import scaled_mm

pytest.importorskip("jax")

KERNELS = {kernel.op: kernel for kernel in BACKEND.kernels()}


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rounding", ["none", "up"])
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("tensor", (5, 333)), ("row", (5, 333)), ("1x128", (2, 40, 300)), ("128x128", (130, 200))],
)
def test_every_bit_of_codes_and_scales(granularity, shape, rounding, form):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randn(*shape[:-1], 1) * 6)
    rows = x.view(-1, shape[-1])
    rows[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rows[1] = 0
    rows[2] *= torch.logspace(-9, 0, shape[-1])  # down to the numbers that a format holds with fewer bits, and below
    rows[3, ::2] = -0.0
    how = {"dtype": form, "granularity": granularity, "scale_rounding": rounding}
    with force("tpu", KERNELS["fp8.quantize"]):
        codes, scale = quantize(x, **how)
    wanted, wanted_scale = quantize.reference(x, **how)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "granularities", [("row", "row"), ("tensor", "row"), ("1x128", "128x128"), ("row", "1x128"), ("128x128", "tensor")]
)
def test_products_of_8_bit_matrices(granularities, out_dtype):
    torch.manual_seed(0)
    of_a, of_b = granularities
    a, scale_a = quantize.reference(torch.randn(70, 600), granularity=of_a)
    b, scale_b = quantize.reference(torch.randn(530, 600), granularity=of_b, dtype=torch.float8_e5m2)
    given = a, b.t(), scale_a, scale_b.t() if scale_b.dim() == 2 else scale_b, torch.randn(530)
    how = {"granularity_a": of_a, "granularity_b": of_b}
    with force("tpu", KERNELS["fp8.scaled_mm"]):
        got = scaled_mm(*given, **how, out_dtype=out_dtype)
    want = scaled_mm.reference(*given, **how, out_dtype=torch.float64)
    coarse = 1e-6 if out_dtype is torch.float32 else 2.0**-8
    assert got.dtype is out_dtype
    torch.testing.assert_close(got.double(), want, rtol=coarse, atol=coarse * want.abs().max().item())


def test_what_the_kernels_do_not_do_is_refused_in_a_sentence():
    codes, scale = quantize.reference(torch.randn(64, 64), granularity="row")
    product = scaled_mm.bind(codes, codes.t(), scale, scale)
    of_blocks = quantize.bind(torch.randn(64, 64), granularity="1x128")
    assert multiplying.unsupported(product) is None
    assert quantising.unsupported(of_blocks) is None
    for module, call, change, says in (
        (multiplying, product, {"a": codes.to(torch.float8_e4m3fnuz)}, "a matrix in torch.float8_e4m3fnuz"),
        (multiplying, product, {"scale_b": scale.double()}, "scales in torch.float64"),
        (multiplying, product, {"granularity_a": "1x32"}, "granularity 1x32"),
        (multiplying, product, {"out_dtype": torch.float64}, "results in torch.float64"),
        (multiplying, product, {"a": codes[:0]}, "without elements"),
        (quantising, of_blocks, {"dtype": torch.float8_e5m2fnuz}, "codes in torch.float8_e5m2fnuz"),
        (quantising, of_blocks, {"scale": torch.ones(64, 1)}, "a scale is given"),
        (quantising, of_blocks, {"granularity": "1x32"}, "granularity 1x32"),
        (quantising, of_blocks, {"scale_rounding": "down"}, "rounded 'down'"),
        (quantising, of_blocks, {"stochastic": True}, "stochastic rounding"),
        (quantising, of_blocks, {"x": torch.randn(1, 40000)}, "rows of 40000"),
    ):
        assert says in str(module.unsupported(call._replace(**change)))
