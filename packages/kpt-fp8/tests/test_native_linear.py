import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kpt_core
import kpt_fp8
from kpt_core import InputError, UnknownNameError
from kpt_fp8 import FP8Tensor, NativeFP8Linear
from kpt_fp8.weights import quantize_weight

GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32", "mxfp8")


def dense(layer, dtype=torch.float32):
    return F.linear, layer.dequantize(dtype), layer.bias


def bits(tensor):
    return tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(40, 33), (200, 136)])
def test_it_is_the_dense_layer_of_what_its_codes_stand_for(granularity, shape):
    torch.manual_seed(0)
    layer = NativeFP8Linear.from_linear(nn.Linear(*shape).double(), granularity=granularity)
    x = torch.randn(3, 2, shape[0], dtype=torch.float64, requires_grad=True)
    apply, weight, bias = dense(layer, torch.float64)
    again = x.detach().requires_grad_()
    out, expected = layer(x), apply(again, weight, bias)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    toward = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, layer.bias), toward)
    wanted = torch.autograd.grad(expected, (again, bias), toward)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_differences():
    layer = NativeFP8Linear.from_linear(nn.Linear(9, 5).double())
    assert torch.autograd.gradcheck(layer, torch.randn(2, 9, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_codes_are_those_of_the_op_however_many_parts(granularity, power_of_two, monkeypatch):
    monkeypatch.setattr("kpt_fp8.weights._NUMBERS", 1)
    weight = torch.randn(300, 70, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 300)[:, None]
    codes, scale, quality = quantize_weight(
        weight, dtype=torch.float8_e5m2, granularity=granularity, power_of_two=power_of_two
    )
    whole = kpt_fp8.quantize_to_fp8(weight, torch.float8_e5m2, granularity, power_of_two=power_of_two)
    assert torch.equal(bits(codes), bits(whole.codes))
    assert scale.dtype is whole.scale.dtype
    assert torch.equal(bits(scale), bits(whole.scale))
    error = (weight - whole.dequantize()).double().square()
    rows = 10 * (weight.double().square().sum(1) / error.sum(1)).log10()
    assert quality.worst_row_sqnr == pytest.approx(float(rows.min()), abs=1e-6)
    assert quality.sqnr == pytest.approx(10 * math.log10(float(weight.double().square().sum() / error.sum())), abs=1e-6)


def test_no_rows_and_a_vector():
    layer = NativeFP8Linear.from_linear(nn.Linear(8, 4))
    assert layer(torch.empty(0, 8)).shape == (0, 4)
    assert layer(torch.empty(2, 0, 8)).shape == (2, 0, 4)
    torch.testing.assert_close(layer(torch.ones(8)), layer(torch.ones(1, 8))[0])


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda m: m.to("cpu", torch.bfloat16)])
def test_conversion_to_another_dtype_leaves_codes_and_scales(convert):
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6), activations="tensor", input_scale=0.1)
    model = nn.Sequential(copy.deepcopy(layer))
    changed = convert(model)[0]
    before = layer.state_dict()
    for name in ("weight", "weight_scale", "input_scale"):
        old, new = before[name], changed.state_dict()[name]
        assert new.dtype is old.dtype
        assert torch.equal(bits(new), bits(old))
    assert changed.weight.dtype is changed.bias.dtype is not torch.float32
    x = torch.randn(3, 40, dtype=changed.bias.dtype)
    assert changed(x).dtype is x.dtype


def test_code_that_asks_the_weight_for_its_dtype():
    """As T5 does it in transformers, and many models beside it."""
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6, dtype=torch.bfloat16))
    assert layer.weight.dtype is torch.bfloat16
    x = torch.randn(3, 40)
    assert torch.equal(layer(x.to(layer.weight.dtype)), layer(x.bfloat16()))
    wide = layer.weight.to(torch.float32)
    torch.testing.assert_close(F.linear(x, wide), F.linear(x, layer.dequantize()))


def test_no_code_is_widened_while_the_dtype_is_converted():
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6, bias=False))
    seen = []
    layer._apply(lambda tensor: seen.append(tensor.double()) or seen[-1])
    assert [(type(each), each.nbytes) for each in seen] == [(FP8Tensor, 40 * 6 + 6 * 4)]


def test_of_a_quantised_weight():
    dense = nn.Linear(160, 6)
    layer = NativeFP8Linear.from_linear(dense, granularity="1x32", activations="mxfp8")
    weight = kpt_fp8.quantize_to_fp8(dense.weight, granularity="1x32")
    made = NativeFP8Linear.from_fp8(weight, dense.bias, activations="mxfp8")
    assert made.bias is dense.bias
    assert made.weight.codes.data_ptr() == weight.codes.data_ptr()
    x = torch.randn(3, 160)
    assert torch.equal(made(x), layer(x))
    static = NativeFP8Linear.from_fp8(weight.t().t(), activations="tensor", input_scale=torch.tensor(0.5))
    assert static.bias is None
    assert float(static.input_scale) == 0.5
    for call, message in (
        (lambda: NativeFP8Linear.from_fp8(dense.weight), "must be an FP8Tensor .* got Parameter"),
        (lambda: NativeFP8Linear.from_fp8(weight.t()), r"got FP8Tensor\(\[160, 6\].*transposed\): make one"),
        (
            lambda: NativeFP8Linear.from_fp8(weight, torch.ones(5)),
            r"bias must be floating \[6\]; got torch.float32 \[5\]",
        ),
        (lambda: NativeFP8Linear.from_fp8(weight, input_scale=0.5), "got activations='none'"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_on_the_meta_device_then_in_memory():
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6), activations="tensor", input_scale=0.1)
    fresh = NativeFP8Linear(40, 6, activations="tensor", static=True, device="meta")
    assert fresh.weight.codes.is_meta
    assert fresh.weight_scale.is_meta
    x = torch.randn(3, 40)
    fresh.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    assigned = NativeFP8Linear(40, 6, activations="tensor", static=True, device="meta")
    state = layer.state_dict()
    assert assigned.load_state_dict(state, assign=True) == ([], [])
    assert torch.equal(assigned(x), layer(x))
    assert assigned.weight.codes.data_ptr() == state["weight"].data_ptr()
    assert not assigned.weight.requires_grad


def test_what_is_missing_is_told():
    made = NativeFP8Linear.from_linear(nn.Linear(64, 64))
    before = made.state_dict()["weight"].view(torch.uint8).clone()
    state = NativeFP8Linear.from_linear(nn.Linear(64, 64)).state_dict()
    for gone, there in (("weight", "weight_scale"), ("weight_scale", "weight")):
        part = {name: each for name, each in state.items() if name != gone}
        with pytest.raises(RuntimeError, match=f"{there} has no {gone}, and codes mean nothing without their scales"):
            made.load_state_dict(part, strict=False)
    with pytest.raises(RuntimeError, match=r"weight: .*scale must be .* of shape \[64\].* got torch.float32 \[63\]"):
        made.load_state_dict({**state, "weight_scale": torch.ones(63)})
    small = NativeFP8Linear.from_linear(nn.Linear(64, 32)).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        NativeFP8Linear(64, 64).load_state_dict(small)
    assert torch.equal(made.state_dict()["weight"].view(torch.uint8), before)
    with pytest.raises(RuntimeError, match=r"Missing key.*\"weight\", \"weight_scale\""):
        made.load_state_dict({"bias": state["bias"]})
    assert made.load_state_dict({"bias": state["bias"]}, strict=False).missing_keys == ["weight", "weight_scale"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"more\""):
        made.load_state_dict({**state, "more": torch.ones(1)})


def test_copied_and_pickled_whole(tmp_path):
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6), granularity="mxfp8", activations="row")
    x = torch.randn(3, 40)
    torch.save(layer, tmp_path / "layer.pt")
    for made in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert isinstance(made.weight, nn.Parameter)
        assert made.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
        assert torch.equal(made(x), layer(x))


def test_its_dtype_is_converted_after_it_was_compiled():
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6))
    x = torch.randn(3, 40)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    layer.bfloat16()
    assert compiled(x.bfloat16()).dtype is torch.bfloat16


def test_state_dict_and_memory():
    layer = NativeFP8Linear.from_linear(nn.Linear(256, 64), granularity="row")
    state = layer.state_dict()
    assert sorted(state) == ["bias", "weight", "weight_scale"]
    assert sum(each.numel() * each.element_size() for each in state.values()) == 256 * 64 + 64 * 4 + 64 * 4
    static = NativeFP8Linear.from_linear(nn.Linear(256, 64, bias=False), activations="tensor", input_scale=0.5)
    assert sorted(static.state_dict()) == ["input_scale", "weight", "weight_scale"]
    fresh = NativeFP8Linear(256, 64)
    assert not fresh(torch.randn(2, 256)).any()
    fresh.load_state_dict(state)
    x = torch.randn(2, 256)
    assert torch.equal(fresh(x), layer(x))


def test_it_shares_no_memory_with_the_old_layer_and_takes_its_mode():
    old = nn.Linear(8, 4).eval()
    old.bias.requires_grad_(False)
    layer = NativeFP8Linear.from_linear(old)
    expected = layer(torch.ones(8))
    with torch.no_grad():
        old.weight.zero_()
        old.bias.fill_(100)
    assert torch.equal(layer(torch.ones(8)), expected)
    assert not layer.training
    assert not layer.bias.requires_grad


@pytest.mark.parametrize("activations", ["row", "1x128", "mxfp8"])
def test_dynamic_activations_are_quantised_as_by_the_function(activations):
    torch.manual_seed(0)
    layer = NativeFP8Linear.from_linear(nn.Linear(160, 7), activations=activations)
    x = torch.randn(3, 160)
    rounded = kpt_fp8.quantize_to_fp8(x, granularity=activations).dequantize()
    torch.testing.assert_close(layer(x), F.linear(rounded, layer.dequantize(), layer.bias))
    assert not torch.allclose(layer(x), F.linear(x, layer.dequantize(), layer.bias), rtol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("activations", "static"), [("tensor", None), ("tensor", 0.01), ("row", None), ("1x128", None), ("1x32", None)]
)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_an_overflow_of_activations_is_seen_in_the_output(number, activations, static, kernels):
    layer = NativeFP8Linear.from_linear(nn.Linear(160, 8), activations=activations, input_scale=static)
    x = torch.randn(2, 160)
    x[0, 3] = number
    with kpt_core.use("torch" if kernels else "reference"):
        out = layer(x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_static_activations_saturate_at_their_scale():
    layer = NativeFP8Linear.from_linear(nn.Linear(4, 3, bias=False), activations="tensor", input_scale=1 / 448)
    torch.testing.assert_close(layer(torch.full((2, 4), 50.0)), layer(torch.ones(2, 4)))


def test_e5m2_weights_meet_e4m3_activations():
    assert NativeFP8Linear(8, 8, dtype=torch.float8_e5m2).activation_dtype is torch.float8_e4m3fn
    assert NativeFP8Linear(8, 8, dtype=torch.float8_e5m2fnuz).activation_dtype is torch.float8_e4m3fnuz


def test_autocast():
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 40)).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch.manual_seed(0)
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6), granularity="128x128")
    x = torch.randn(3, 40, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    got = torch.autograd.grad(compiled(x).square().sum(), (x, layer.bias))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_exported_for_any_number_of_rows():
    layer = NativeFP8Linear.from_linear(nn.Linear(40, 6)).eval()
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (torch.randn(2, 3, 40),), dynamic_shapes=dynamic)
    x = torch.randn(4, 7, 40)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_repr():
    text = repr(NativeFP8Linear(8, 4, granularity="mxfp8", activations="tensor", static=True))
    assert "in_features=8, out_features=4, bias=True, granularity='1x32', activations='tensor', static=True" in text


def test_refusals():
    cases = [
        (lambda: NativeFP8Linear(0, 4), InputError, "in_features must be a positive integer; got 0"),
        (lambda: NativeFP8Linear(8, 4, granularity="rows"), UnknownNameError, "did you mean 'row'"),
        (lambda: NativeFP8Linear(8, 4, activations="token"), UnknownNameError, "granularity of activations 'token'"),
        (lambda: NativeFP8Linear(8, 4, dtype=torch.int8), InputError, "dtype must be float8_e4m3fn.*got torch.int8"),
        (lambda: NativeFP8Linear(8, 4, activations="row", static=True), InputError, "got activations='row'"),
        (lambda: NativeFP8Linear.from_linear(nn.ReLU()), InputError, "must be an nn.Linear; got ReLU"),
        (lambda: NativeFP8Linear.from_linear(nn.Linear(2, 2, device="meta")), InputError, "meta device.*load"),
        (
            lambda: NativeFP8Linear(8, 4)(torch.ones(2, 8).to(torch.float8_e5m2)),
            InputError,
            "x must be float64, .*got torch.float8_e5m2",
        ),
        (lambda: NativeFP8Linear(8, 4)(torch.ones(3, 7)), InputError, r"input must be \[..., 8\]; got \[3, 7\]"),
    ]
    for number in (0, -1.0, math.nan, math.inf):
        cases.append(
            (
                lambda number=number: NativeFP8Linear.from_linear(
                    nn.Linear(2, 2), activations="tensor", input_scale=number
                ),
                InputError,
                "input_scale must be positive and finite",
            )
        )
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    broken = nn.Linear(8, 4)
    broken.weight.data[1, 2] = math.nan
    with pytest.raises(InputError, match="finite in float32; got 1 of 32"):
        NativeFP8Linear.from_linear(broken)
    layer = NativeFP8Linear(8, 4).requires_grad_()
    with pytest.raises(InputError, match=r"got requires_grad=True: call requires_grad_\(False\)"):
        layer(torch.ones(1, 8))


def test_codes_of_another_format_are_not_loaded():
    made = NativeFP8Linear.from_linear(nn.Linear(64, 64))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    others = (
        nn.Linear(64, 64).state_dict(),
        NativeFP8Linear.from_linear(nn.Linear(64, 64), dtype=torch.float8_e5m2).state_dict(),
    )
    for state in others:
        with pytest.raises(RuntimeError, match=r"weight must be torch.float8_e4m3fn; got torch.float(32|8_e5m2): load"):
            made.load_state_dict(state, strict=False)
    for name, value in made.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))


def test_a_static_scale_is_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = NativeFP8Linear.from_linear(nn.Linear(64, 64), activations="tensor", input_scale=0.1)
        assert made.input_scale.dtype is torch.float32
        assert made(torch.randn(2, 64)).dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_without_memory_is_reset_to_a_new_one():
    layer = NativeFP8Linear(64, 64, activations="tensor", static=True, device="meta").to_empty(device="cpu")
    layer.input_scale.fill_(math.nan)  # as memory that nothing was written to may be
    layer.reset_parameters()
    assert torch.equal(layer(torch.randn(2, 64)), torch.zeros(2, 64))
    assert float(layer.input_scale) == 1
