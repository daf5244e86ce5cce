"""8-bit linear layers and products: what the suite's cases leave out."""

import pytest
import torch

import kpt_core
from kpt_core import get_op

CODES = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
ROW = torch.linspace(0.5, 1.5, 40)


@pytest.mark.parametrize("activations", ["tensor", "row", "1x128"])
@pytest.mark.parametrize("spoiled", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_in_its_row_alone(kernels, activations, spoiled):
    x = torch.randn(3, 256)
    x[1, 200] = spoiled
    out = kernels["linear"](x, CODES, ROW, activations=activations)
    assert out.isfinite().all(1).tolist() == [True, False, True]
    assert out[1].isnan().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weight": CODES.to(torch.float32).to(torch.float8_e4m3fnuz)}, "codes of torch.float8_e4m3fnuz; needs"),
        ({"scale": torch.ones(40, 2), "granularity": "1x128"}, "scales of the weight by 1x128; needs tensor, row"),
        ({"activations": "1x32"}, "activations of torch.float8_e4m3fn by 1x32; needs"),
        ({"activations": "row", "activation_dtype": torch.float8_e5m2fnuz}, "activations of torch.float8_e5m2fnuz"),
    ],
    ids=["format", "scales", "activations", "format of activations"],
)
def test_it_refuses_in_a_sentence_and_plain_pytorch_serves(options, sentence, kernels):
    call = {"weight": CODES, "scale": ROW, **options}
    with kpt_core.use("cpu", op="fp8.linear"), pytest.raises(kpt_core.NoKernelError, match=sentence):
        get_op("fp8.linear")(torch.randn(2, 256), **call)
    assert get_op("fp8.linear")(torch.randn(2, 256), **call).isfinite().all()


def test_a_layer_runs_natively_under_a_compiler_too(kernels):
    def layer(x):
        return get_op("fp8.linear")(x, CODES, ROW)

    x = torch.randn(5, 256)
    with kpt_core.record() as selections:
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert [each.backend for each in selections] == ["cpu"]
    assert torch.equal(got, layer(x))
