"""The FP8 layers beside the experts, where transformers has no kernels: products of the dequantised weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import record

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
    pytest.skip("this transformers has no registry of FP8 experts", allow_module_level=True)

from kpt_moe.transformers.fp8_loading import KptFP8GroupedLinear, KptFP8Linear, serve  # noqa: E402
from test_transformers_fp8_experts import BLOCK, quantised, relative, widened  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "powers of two": {"scale_fmt": "ue8m0"},
    "a bias": {"has_bias": True},
    "one scale": {"block_size": None},
    "static activation scale": {"block_size": None, "activation_scheme": "static", "has_bias": True},
}


def fill(module: Any, block: list[int] | None, ue8m0: bool) -> Tensor:
    """Set the parameters as a checkpoint does, and return the matrix in float64."""
    codes, scale = quantised(tuple(module.weight.shape), block, ue8m0)
    module.weight = nn.Parameter(codes)
    module.weight_scale_inv = nn.Parameter(
        scale.reshape(module.weight_scale_inv.shape).to(module.weight_scale_inv.dtype)
    )
    if module.bias is not None:
        nn.init.normal_(module.bias)
    return widened(codes, scale, block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(256, 128), (200, 72)])
def test_value_and_gradient(kind, sizes):
    choices = {"block_size": BLOCK, **KINDS[kind]}
    module = fp8.FP8Linear(*sizes, **choices)
    matrix = fill(module, choices["block_size"], "scale_fmt" in choices)
    x = torch.randn(2, 3, sizes[0], requires_grad=True)
    with pytest.raises(ImportError):  # or this test would say nothing
        module(x)
    serve(module)
    assert type(module) is KptFP8Linear
    with record() as log:
        have = module(x)
    assert [selection.op for selection in log] == ["moe.scaled_grouped_mm"]
    want = F.linear(x.double(), matrix, None if module.bias is None else module.bias.double())
    assert have.shape == want.shape
    assert relative(have, want) < 1e-6
    grad = torch.randn(have.shape)
    parameters = [x] if module.bias is None else [x, module.bias]
    for a, b in zip(
        torch.autograd.grad(have, parameters, grad), torch.autograd.grad(want, parameters, grad.double()), strict=True
    ):
        assert relative(a, b) < 1e-6
    assert module(x[:, :0]).shape == (2, 0, sizes[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_rounding(dtype):
    module = fp8.FP8Linear(256, 128, block_size=BLOCK)
    matrix = fill(module, BLOCK, False)
    serve(module)
    x = torch.randn(9, 256).to(dtype)
    have = module(x)
    assert have.dtype is dtype
    assert relative(have, x.double() @ matrix.T) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("has_bias", [False, True])
def test_groups(has_bias):
    module = fp8.FP8GroupedLinear(136, 3 * 128, 3, block_size=BLOCK, has_bias=has_bias)
    matrix = fill(module, BLOCK, False)
    serve(module)
    assert type(module) is KptFP8GroupedLinear
    x = torch.randn(2, 4, 3, 136)
    want = torch.einsum("abgi,goi->abgo", x.double(), matrix.view(3, 128, 136))
    if has_bias:
        want = want + module.bias.double().view(3, 128)
    assert relative(module(x), want) < 1e-6


def test_what_was_dequantised_is_a_linear_layer():
    module = fp8.FP8Linear(256, 128, block_size=BLOCK)
    serve(module)
    module.weight, module.weight_scale_inv = nn.Parameter(torch.randn(128, 256)), None
    x = torch.randn(3, 256)
    assert torch.equal(module(x), F.linear(x, module.weight))


def test_a_class_of_somebody_else_is_left_alone():
    own = type("FP8Linear", (fp8.FP8Linear,), {})
    module = own(256, 128, block_size=BLOCK)
    serve(module)
    assert type(module) is own
