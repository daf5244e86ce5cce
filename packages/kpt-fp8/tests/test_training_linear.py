"""`FP8TrainingLinear`: its three products, what it observes, and how torch's tools take it."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError, UnknownNameError
from kpt_fp8 import NativeFP8Linear, convert_model_to_fp8, dequantize, quantize
from kpt_fp8.training import (
    FP8Recipe,
    FP8TrainingLinear,
    convert_to_fp8_training,
    delayed_state,
    load_delayed_state,
    update_delayed_scales,
)
from kpt_fp8.training.quantizing import AMAX, ERROR, GRADIENT, INPUT, SATURATED, WEIGHT, ZEROS

E5M2 = torch.float8_e5m2


def pair(recipe, k=192, n=96, **options):
    torch.manual_seed(0)
    plain = nn.Linear(k, n, **options)
    return plain, FP8TrainingLinear.from_linear(copy.deepcopy(plain), recipe)


def run(layer, x, gradient):
    return run_as(layer, layer, x, gradient)


def run_as(call, layer, x, gradient):
    x = x.detach().clone().requires_grad_()
    out = call(x)
    out.backward(gradient)
    gradients = [x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]
    layer.zero_grad()
    return out.detach(), *gradients


def rounded(x, granularity, dtype=torch.float8_e4m3fn):
    codes, scale = quantize(x, granularity=granularity, dtype=dtype)
    return dequantize(codes, scale, granularity=granularity, dtype=torch.float64)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
@pytest.mark.parametrize("shape", [(192,), (5, 192), (2, 65, 192), (2, 3, 7, 192)])
def test_the_three_products_are_those_of_what_was_quantised(recipe, shape):
    plain, layer = pair(recipe)
    x, gradient = torch.randn(shape), 1e-6 * torch.randn(*shape[:-1], 96)
    out, grad_x, grad_weight, grad_bias = run(layer, x, gradient)
    rows, weight, back = x.reshape(-1, 192), plain.weight.detach(), gradient.reshape(-1, 96)
    shared, of_weight = {"row": ("row", "row"), "block": ("1x128", "128x128")}.get(recipe, ("tensor", "tensor"))
    expected = rounded(rows, shared) @ rounded(weight, of_weight).t() + plain.bias.detach().double()
    assert out.shape == (*shape[:-1], 96)
    assert relative(out.reshape(-1, 96), expected) < 1e-6
    of_back = weight if of_weight != "row" else weight.t()
    dense = rounded(of_back, of_weight) if of_weight != "row" else rounded(of_back, "row").t()
    assert grad_x.shape == x.shape
    assert relative(grad_x.reshape(-1, 192), rounded(back, shared, E5M2) @ dense) < 1e-6
    if recipe == "row":
        expected = back.double().t() @ rows.double()
    elif recipe == "block":
        expected = rounded(back.t(), "1x128", E5M2) @ rounded(rows.t(), "1x128").t()
    else:
        expected = rounded(back, "tensor", E5M2).t() @ rounded(rows, "tensor")
    assert relative(grad_weight, expected) < 1e-6
    torch.testing.assert_close(grad_bias, back.sum(0))
    # Against what is exact: two roundings of 3 and of 2 bits.
    exact = run(plain, x, gradient)
    assert 1e-3 < relative(out, exact[0]) < 0.06
    assert 1e-3 < relative(grad_x, exact[1]) < 0.09


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
def test_only_what_is_asked_for_gets_a_gradient(recipe):
    _, layer = pair(recipe, bias=False)
    x = torch.randn(3, 192)
    assert run(layer, x, torch.ones(3, 96))[3] is None
    layer.weight.requires_grad_(False)
    out = layer(x.requires_grad_())
    out.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.weight.requires_grad_()
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
def test_no_rows_at_all(recipe):
    _, layer = pair(recipe)
    out, grad_x, grad_weight, grad_bias = run(layer, torch.randn(0, 192), torch.randn(0, 96))
    assert out.shape == (0, 96)
    assert grad_x.shape == (0, 192)
    assert not grad_weight.any()
    assert not grad_bias.any()


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_never_clamped_away(recipe, bad):
    plain, layer = pair(recipe)
    x, gradient = torch.randn(4, 192), torch.randn(4, 96)
    x[1, 5] = bad
    out = run(layer, x, gradient)[0]
    assert not out[1].isfinite().any()
    # Other rows have a scale of their own, or share it.
    assert out[0].isfinite().all() == (recipe in ("row", "block"))
    x[1, 5], gradient[2, 7] = 1, bad
    _, grad_x, grad_weight, _ = run(layer, x, gradient)
    assert not grad_x[2].isfinite().all()
    assert not grad_weight[7].isfinite().all()
    seen = layer.observed[:, AMAX]
    assert not seen[INPUT].isfinite()
    assert not seen[GRADIENT].isfinite()
    assert seen[WEIGHT] == plain.weight.abs().max()


def test_what_it_observes():
    plain, layer = pair("tensor")
    x, gradient = torch.randn(4, 192), torch.randn(4, 96)
    x[0, :96] = 0
    x[1] = 1e-6  # underflows beside the others
    layer.measures = True
    run(layer, x, gradient)
    seen = layer.observed
    assert seen[INPUT, AMAX] == x.abs().max()
    assert seen[WEIGHT, AMAX] == plain.weight.abs().max()
    assert seen[GRADIENT, AMAX] == gradient.abs().max()
    assert not seen[:, SATURATED].any()
    zeros = rounded(x, "tensor") == 0
    torch.testing.assert_close(seen[INPUT, ZEROS], zeros.float().mean())
    assert 0.37 < zeros.float().mean() < 0.4
    rows = (rounded(x, "tensor") - x.double()).norm(dim=1) / x.double().norm(dim=1)
    torch.testing.assert_close(seen[INPUT, ERROR].double(), rows.mean(), rtol=1e-5, atol=0)
    assert 0.25 < rows.mean() < 0.3  # a row of four is lost
    assert 0.04 < seen[GRADIENT, ERROR] < 0.06
    layer.reset_observed()
    assert not layer.observed.any()
    layer.eval()
    run(layer, x, gradient)
    assert not layer.observed.any()


def test_delayed_scales_are_those_of_the_largest_of_the_last_steps():
    recipe = FP8Recipe(delayed=True, history=3, margin=1, gradient_margin=4)
    _, layer = pair(recipe)
    x, gradient = torch.randn(8, 192), torch.randn(8, 96)
    tops = []
    for step, factor in enumerate((1.0, 1.5, 1.2, 0.5, 0.5, 0.5, 0.5)):
        run(layer, factor * x, factor * gradient)
        known = layer.observed[:, AMAX].clone()
        # The first step reads the numbers; later ones know them as codes do.
        exact = factor * x.abs().max()
        torch.testing.assert_close(known[INPUT], exact, rtol=0.07 if step else 0, atol=0)
        assert not layer.observed[:, SATURATED].any()
        tops.append(known)
        update_delayed_scales(layer)
        assert not layer.observed.any()
        most = torch.stack(tops[-3:]).amax(0)
        torch.testing.assert_close(layer.scales, most * torch.tensor([2 / 448, 2 / 448, 16 / 57344]))
        assert layer.delayed_ready == (True, True, True)
    used = layer.scales[INPUT].clone()
    out = layer(x)
    codes, _ = quantize(x, used)
    weight, _ = quantize(layer.weight, layer.scales[WEIGHT])
    expected = (
        dequantize(codes, used, granularity="tensor")
        @ dequantize(weight, layer.scales[WEIGHT], granularity="tensor").t()
    )
    torch.testing.assert_close(out, expected + layer.bias)


def test_saturation_under_a_delayed_scale_is_counted():
    _, layer = pair("delayed")
    x, gradient = torch.rand(8, 192), torch.rand(8, 96)
    run(layer, x, gradient)
    update_delayed_scales(layer)
    x[0, :48] = 100.0
    gradient[3, 0] = -50.0
    run(layer, x, gradient)
    torch.testing.assert_close(
        layer.observed[:, SATURATED], torch.tensor([48 / (8 * 192), 0.0, 1 / (8 * 96)]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("larger", [0.01, 1, 8])
def test_what_is_evaluated_is_scaled_by_itself(larger):
    plain, layer = pair("delayed")
    x = torch.randn(64, 192)
    for _ in range(3):
        run(layer, x, torch.randn(64, 96))
        update_delayed_scales(layer)
    with torch.no_grad():
        want = plain(larger * x)
        assert relative(layer.eval()(larger * x), want) < 0.06
        assert (relative(layer.train()(larger * x), want) < 0.06) == (larger < 8)  # by history, which saturates


def test_replayed_and_accumulated_passes_count_once():
    """Activation checkpointing runs the forward pass twice."""
    _, layer = pair("delayed")
    twin = copy.deepcopy(layer)
    batches = [torch.randn(4, 192), 2 * torch.randn(4, 192)]
    for _ in range(3):
        for batch in batches:
            layer(batch).square().sum().backward()
            again = checkpoint(twin, batch.clone().requires_grad_(), use_reentrant=False)
            again.square().sum().backward()
        torch.testing.assert_close(layer.observed, twin.observed, rtol=0, atol=0)
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=0, atol=0)
        for each in (layer, twin):
            update_delayed_scales(each)
            each.zero_grad()
    torch.testing.assert_close(layer.amax_history, twin.amax_history, rtol=0, atol=0)
    assert int((layer.amax_history[INPUT] > 0).sum()) == 3
    assert layer.amax_history[INPUT, 0] >= 0.93 * batches[1].abs().max()


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
def test_autocast(recipe):
    _, layer = pair(recipe)
    x = torch.randn(2, 5, 192, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        loss = out.float().square().mean()
    assert out.dtype is torch.bfloat16
    loss.backward()
    assert x.grad.dtype is layer.weight.grad.dtype is layer.bias.grad.dtype is torch.float32
    # The weight is quantised from its full precision; the input was rounded by autocast.
    plain = layer(x.detach().bfloat16().float())
    torch.testing.assert_close(out.float(), plain, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    layer = FP8TrainingLinear(64, 32, dtype=dtype)
    assert layer.observed.dtype is torch.float32
    x = torch.randn(3, 64, dtype=dtype)
    out, grad_x, grad_weight, grad_bias = run(layer, x, torch.ones(3, 32, dtype=dtype))
    assert {each.dtype for each in (out, grad_x, grad_weight, grad_bias)} == {dtype}


def test_moving_and_converting_leaves_what_is_observed_exact():
    _, layer = pair("delayed")
    run(layer, torch.randn(4, 192), torch.randn(4, 96))
    update_delayed_scales(layer)
    before = layer.scales.clone()
    layer.half()
    assert layer.weight.dtype is torch.float16
    torch.testing.assert_close(layer.scales, before, rtol=0, atol=0)
    assert {each.dtype for each in layer.buffers()} == {torch.float32}
    moved = copy.deepcopy(layer).to("meta")
    assert {each.device.type for each in (*moved.buffers(), *moved.parameters())} == {"meta"}
    assert moved(torch.empty(5, 192, dtype=torch.float16, device="meta")).shape == (5, 96)


def test_state_dict():
    plain, layer = pair("tensor")
    assert layer.state_dict().keys() == plain.state_dict().keys()
    _, delayed = pair("delayed")
    run(delayed, torch.randn(4, 192), torch.randn(4, 96))
    update_delayed_scales(delayed)
    other = FP8TrainingLinear(192, 96, recipe="delayed")
    assert delayed.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(delayed.state_dict())
    other.load_state_dict(delayed.state_dict())
    load_delayed_state(other, delayed_state(delayed))
    assert other.delayed_ready == (True, True, True)
    x = torch.randn(4, 192)
    assert torch.equal(other(x), delayed(x))
    assert not torch.equal(other(x), pair("tensor")[1](x))


def test_histories_of_another_recipe_are_refused():
    _, delayed = pair("delayed")
    with pytest.raises(InputError, match="'amax_history' is not alike in the state and in the model"):
        load_delayed_state(pair("tensor")[1], delayed_state(delayed))
    with pytest.raises(InputError, match="'amax_history' is not alike"):
        load_delayed_state(pair(FP8Recipe(delayed=True, history=4))[1], delayed_state(delayed))


@pytest.mark.parametrize("recipe", ["delayed", "row"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_trained_model_is_converted_for_inference_in_one_call(recipe, inplace):
    plain = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64, bias=False))
    model = copy.deepcopy(plain)
    convert_to_fp8_training(model, recipe)
    model(torch.randn(4, 128)).sum().backward()
    update_delayed_scales(model)
    with pytest.raises(InputError, match="it trains in FP8 already"):
        convert_to_fp8_training(model, recipe)
    converted, expected = convert_model_to_fp8(model, inplace=inplace), convert_model_to_fp8(plain)
    assert [type(each) for each in converted] == [NativeFP8Linear] * 2
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor.float(), converted.state_dict()[name].float())
    assert isinstance(model[0], NativeFP8Linear if inplace else FP8TrainingLinear)


def twice(model, x):
    for parameter in model.parameters():
        parameter.grad = None
    out = model(x)
    out.square().mean().backward()
    return out, *(each.grad for each in model.parameters()), *(each.clone() for each in model.buffers())


@pytest.mark.slow
# torch 2.13 makes such an object itself, while Dynamo traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [*((recipe, "aot_eager") for recipe in ("tensor", "delayed", "row", "block")), ("tensor", "inductor")],
)
def test_compiled_as_one_graph(recipe, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    convert_to_fp8_training(model, recipe)
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, fullgraph=True, backend=backend)
    x = torch.randn(3, 5, 64)
    for _ in range(3):
        for expected, got in zip(twice(model, x), twice(compiled, x), strict=True):
            # A sum in another order may be rounded to another code.
            assert relative(got, expected) < 1e-3 or torch.equal(got, expected)
        update_delayed_scales(model)
        update_delayed_scales(copied)
        for ours, theirs in zip(model.buffers(), copied.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row", "block"])
def test_a_compiler_sees_one_op_that_gives_what_is_given_without_it(recipe):
    torch._dynamo.reset()
    _, layer = pair(recipe, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    graphs = []

    def look(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call_")])
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(twin, fullgraph=True, backend=look, dynamic=False)
    torch.manual_seed(1)
    for frozen in (False, True):
        layer.weight.requires_grad_(not frozen)
        twin.weight.requires_grad_(not frozen)
        for size in (1, 1, 64):  # the last one saturates under delayed scales
            x, gradient = size * torch.randn(160, 192).bfloat16(), torch.randn(160, 96).bfloat16()
            for expected, got in zip(run(layer, x, gradient), run_as(compiled, twin, x, gradient), strict=True):
                assert expected is got is None or torch.equal(expected, got)
            assert torch.equal(layer.observed, twin.observed)
            update_delayed_scales(layer)
            update_delayed_scales(twin)
    for targets in graphs:
        assert targets.count(torch.ops.kpt_fp8.training_product.default) == 1
        assert len(targets) < 16


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_the_ops_of_a_compiler_are_what_they_say(recipe):
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((130, 192), (96, 192), (96,)))
    observed, of_gradient = torch.rand(2, 4), torch.rand(1, 4)
    plain = (recipe, torch.float8_e4m3fn, E5M2, [recipe == "tensor"] * 3, True, True)
    op = torch.ops.kpt_fp8.training_product.default
    scales = torch.ones(3) if recipe == "tensor" else None
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for needs in ([True, True], [False, True], [True, False]):
        given = [each.detach().requires_grad_(need) for each, need in zip((x, weight), needs, strict=True)]
        torch.library.opcheck(op, (*given, bias, observed, of_gradient, scales, *plain, needs), test_utils=checks)


def test_a_layer_of_an_optimizer_keeps_its_parameters_and_the_others_their_reasons():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 64))
    parameters = list(model.parameters())
    left = convert_to_fp8_training(model, "row", exclude="2")
    assert [type(each) for each in model] == [FP8TrainingLinear, nn.Linear, nn.Linear]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert left == {"1": "64 to 8 features, fewer than min_features=64", "2": "excluded by '2'"}
    assert "recipe=row" in str(model[0])


def test_wrong_input():
    layer = FP8TrainingLinear(64, 32)
    with pytest.raises(InputError, match=r"input must be floating \[..., 64\]; got torch.float32 \[3, 63\]"):
        layer(torch.randn(3, 63))
    with pytest.raises(InputError, match=r"input must be floating \[..., 64\]; got torch.int64 \[3, 64\]"):
        layer(torch.ones(3, 64, dtype=torch.int64))
    with pytest.raises(InputError, match="in_features must be a positive integer; got 0"):
        FP8TrainingLinear(0, 32)
    with pytest.raises(InputError, match=r"linear must be an nn.Linear; got Conv1d"):
        FP8TrainingLinear.from_linear(nn.Conv1d(1, 1, 1))
    with pytest.raises(UnknownNameError, match="unknown FP8 recipe 'rows': did you mean 'row'"):
        FP8TrainingLinear(64, 32, recipe="rows")
    with pytest.raises(InputError, match="delayed scales need a history; this layer was made with recipe tensor"):
        layer.set_recipe(FP8Recipe(delayed=True))
    with pytest.raises(InputError, match="delayed scales are one for a tensor; got granularity='row'"):
        FP8Recipe(granularity="row", delayed=True)
    with pytest.raises(InputError, match=r"float8_e5m2 and torch.float8_e5m2, which no device multiplies"):
        FP8Recipe(dtype=torch.float8_e5m2)
    with pytest.raises(InputError, match="margin must be a positive integer; got 0"):
        FP8Recipe(margin=0)
    with pytest.raises(InputError, match=r"no layer to convert.*fewer than min_features=64"):
        convert_to_fp8_training(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(InputError, match=r"use FP8TrainingLinear\.from_linear"):
        convert_to_fp8_training(nn.Linear(64, 64))


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_torch_func_differentiates_it_as_often_as_asked_for(recipe):
    torch.manual_seed(0)
    linear = FP8TrainingLinear(64, 32, recipe=recipe)
    x, parameters = torch.randn(8, 64), dict(linear.named_parameters())

    def loss(given):
        return torch.func.functional_call(linear, given, (x,)).square().mean()

    found, value = torch.func.grad_and_value(loss)(parameters)
    plain = linear(x).square().mean()
    torch.testing.assert_close(value, plain, rtol=1e-5, atol=0)
    for name, want in zip(parameters, torch.autograd.grad(plain, linear.parameters()), strict=True):
        assert (found[name] - want).norm() <= 0.1 * want.norm()  # gradients are not quantised there
    second = torch.func.grad(lambda given: sum(g.square().sum() for g in torch.func.grad(loss)(given).values()))(
        parameters
    )
    assert all(each.isfinite().all() and each.any() for each in second.values())
