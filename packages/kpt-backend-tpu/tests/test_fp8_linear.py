"""Linear layers with 8-bit weights by JAX on the CPU against the op's reference: values and gradients."""

import pytest
import torch

import kpt_core
from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.fp8.linear import unsupported
from kpt_core.dispatch import force
from kpt_fp8.linear import linear
from kpt_fp8.quantize import quantize

pytest.importorskip("jax")

(KERNEL,) = (kernel for kernel in BACKEND.kernels() if kernel.op == "fp8.linear")


def arguments(granularity="row", dtype=torch.float32, form=torch.float8_e4m3fn):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 161, generator=generator), torch.randn(130, 161, generator=generator)
    codes, scale = quantize.reference(weight, dtype=form, granularity=granularity)
    bias = torch.randn(130, generator=generator).to(dtype)
    return {"x": x.to(dtype), "weight": codes, "scale": scale, "bias": bias, "granularity": granularity}


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128", "1x32"])
def test_products_with_an_8_bit_weight_and_their_gradients(granularity, dtype, form):
    given = arguments(granularity, dtype, form)
    pull = torch.randn(9, 130, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for kernel in (True, False):
        leaves = {n: given[n].clone().requires_grad_() for n in ("x", "bias")}
        with force("tpu", KERNEL) if kernel else kpt_core.use("reference", strict=True):
            out = linear(**given | leaves)
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), pull)])
    coarse = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for got, want in zip(*results, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, rtol=coarse, atol=coarse * want.detach().abs().max().item())


def test_what_the_kernel_does_not_do_is_refused_in_a_sentence():
    call = linear.bind(**arguments())
    assert unsupported(call) is None
    for change, says in (
        ({"weight": call.weight.to(torch.float8_e4m3fnuz)}, "a weight in torch.float8_e4m3fnuz; torch_xla holds"),
        ({"scale": call.scale.double()}, "scales in torch.float64; this kernel takes float32"),
        ({"activations": "row"}, "activations='row'; this kernel is for a quantised weight alone"),
        ({"x": call.x[:0]}, "without elements"),
    ):
        assert says in str(unsupported(call._replace(**change)))
