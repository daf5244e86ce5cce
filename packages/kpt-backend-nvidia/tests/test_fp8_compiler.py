"""`FP8Compiler`: which chips it takes, what it makes of a model, and figures that are computed, not told."""

import importlib.util

import pytest
import torch
from torch import nn

import kpt_core
from kpt_backend_nvidia import FP8Compiler
from kpt_core import FallbackWarning, InputError, UnknownNameError
from kpt_fp8 import NativeFP8Linear
from kpt_fp8.training import FP8TrainingLinear
from kpt_optimize.measure import relative_error
from simulated_cuda import FakeDevice, simulate

BF16, FP8, BANDWIDTH = 989e12, 1979e12, 3350e9  # of the H100 SXM's data sheet


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 10)).bfloat16()


@pytest.mark.parametrize(
    ("target", "chip", "granularity"),
    [
        ("L4", "sm89", "tensor"),
        ("sm89", "sm89", "tensor"),
        ("H100", "sm90", "row"),
        ("B200", "sm100", "row"),
        ("sm120", "sm120", "row"),
    ],
)
def test_chips_with_fp8_get_the_scales_that_their_library_takes(model, target, chip, granularity):
    compiler = FP8Compiler(target=target)
    engine = compiler.prepare_for_inference(model)
    assert compiler.target.chip == chip
    assert {layer.granularity for layer in layers_of(engine)} == {granularity}
    assert {layer.activations for layer in layers_of(engine)} == {granularity}
    assert compiler.statistics(engine).unserved == {}


def layers_of(engine):
    return [each for each in engine.model.modules() if isinstance(each, NativeFP8Linear)]


@pytest.mark.parametrize("target", ["A100", "sm80", "sm86", "MI300X", "cpu"])
def test_a_target_without_fp8_units_of_nvidia_is_refused_with_what_to_do_instead(target):
    with pytest.raises(InputError, match=r"sm89 \(Ada\) or newer is needed: convert_model_to_fp8 of kpt_fp8"):
        FP8Compiler(target=target)


@pytest.mark.parametrize(("capability", "chip"), [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm87")])
def test_an_ampere_device_is_refused(monkeypatch, capability, chip):
    simulate(monkeypatch, FakeDevice(capability=capability, name="some Ampere"))
    with pytest.raises(InputError, match=rf"some Ampere \({chip}\) has no units"):
        FP8Compiler()


def test_the_current_device_is_taken_and_without_one_a_target_is_asked_for(monkeypatch):
    simulate(monkeypatch, FakeDevice(), FakeDevice(capability=(8, 9), name="NVIDIA L4"))
    assert (FP8Compiler().device, FP8Compiler().target.chip) == (torch.device("cuda", 0), "sm90")
    assert FP8Compiler("cuda:1").target.product == "NVIDIA L4"
    with pytest.raises(InputError, match="a device or a target"):
        FP8Compiler("cuda:1", target="H100")
    simulate(monkeypatch)
    with pytest.raises(InputError, match=r"FP8Compiler\(target='H100'\)"):
        FP8Compiler()
    with pytest.raises(UnknownNameError):
        FP8Compiler(target="H1000")


def test_without_kpt_fp8_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \./packages/kpt-fp8"):
        FP8Compiler(target="H100")


def test_a_prepared_model_computes_in_fp8_what_the_original_does(model):
    before = {name: each.clone() for name, each in model.state_dict().items()}
    engine = FP8Compiler(target="H100").prepare_for_inference(model)
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    with kpt_core.record() as selections:
        out = engine(x)
    assert [each.op for each in selections] == ["fp8.linear"] * 2  # the third is too small to be converted
    with torch.no_grad():
        error = relative_error(out, model(x))
    assert 0 < error < 0.08
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_calibration_gives_activations_static_scales(model):
    data = [torch.randn(32, 128, dtype=torch.bfloat16)]
    engine = FP8Compiler(target="H100").prepare_for_inference(model, calibration=data)
    assert all(layer.granularity == "tensor" and layer.input_scale is not None for layer in layers_of(engine))


def test_statistics_are_bytes_and_errors_that_were_counted(model):
    compiler = FP8Compiler(target="H100")
    engine = compiler.prepare_for_inference(model)
    found = compiler.statistics(engine)
    assert (found.layers, found.bytes_before) == (
        2,
        sum(p.nbytes for p in (*model[0].parameters(), *model[2].parameters())),
    )
    # A byte for a weight, four for a row's scale, two for its bias.
    assert found.bytes_after == 128 * 256 + 6 * 256 + 256 * 64 + 6 * 64
    errors = {
        name: ((engine.model[name].dequantize() - model[name].weight.float()).norm() / model[name].weight.norm()).item()
        for name in (0, 2)
    }
    worst = max(errors, key=errors.__getitem__)
    assert found.worst == str(worst)
    assert found.error == pytest.approx(errors[worst], rel=1e-2)
    assert list(found.left) == ["3"]
    assert "min_features" in str(found)
    assert compiler.statistics(engine.model) == found


@pytest.mark.parametrize(
    ("target", "dtype", "settings", "reason"),
    [
        ("H100", torch.float32, {"granularity": "row"}, "a result in torch.float32"),
        ("L4", torch.float16, {"granularity": "row"}, "from sm90 on"),
        ("H100", torch.bfloat16, {"activations": "none"}, "its activations stay in 16 bits"),
        ("H100", torch.float16, {"min_features": 10}, "in multiples of 16"),
    ],
)
def test_layers_that_the_product_would_not_multiply_in_8_bits_are_told(model, target, dtype, settings, reason):
    compiler = FP8Compiler(target=target)
    with pytest.warns(FallbackWarning, match=reason):
        engine = compiler.prepare_for_inference(model.to(dtype), **settings)
    unserved = compiler.statistics(engine).unserved
    assert reason in list(unserved.values())[-1]
    assert len(unserved) == (1 if "min_features" in settings else 2)


@pytest.mark.parametrize(("target", "settings"), [("L4", {"granularity": "row"}), ("H100", {"min_features": 10})])
def test_layers_that_the_vendors_library_refuses_are_multiplied_in_8_bits_by_triton(model, target, settings):
    compiler = FP8Compiler(target=target)
    engine = compiler.prepare_for_inference(model.bfloat16(), **settings)
    assert compiler.statistics(engine).unserved == {}


@pytest.mark.parametrize("rows", [1, 300, 65536])
def test_the_estimate_is_the_roofline_of_each_call(rows):
    layer = nn.Sequential(nn.Linear(4096, 8192, device="meta", dtype=torch.bfloat16))
    found = FP8Compiler(target="NVIDIA H100 80GB HBM3").estimate_speedup(layer, rows)
    flops, moved, weights = 2 * rows * 4096 * 8192, 2 * rows * (4096 + 8192), 4096 * 8192
    before = max(flops / BF16, (moved + 2 * weights) / BANDWIDTH)
    after = max(flops / FP8, (moved + weights + 4 * 8192) / BANDWIDTH)
    (call,) = found.layers
    assert (call.before, call.after) == (pytest.approx(before), pytest.approx(after))
    assert found.ratio == pytest.approx(before / after)
    assert found.ratio == pytest.approx(2, rel=5e-3) or rows == 300
    assert call.bound == ("arithmetic" if rows == 65536 else "memory")
    assert "at most" in str(found)
    assert "not a measurement" in str(found)


def test_rows_are_those_of_a_run_and_layers_that_stay_gain_nothing(model):
    compiler = FP8Compiler(target="H100")
    x = torch.randn(4, 7, 128, dtype=torch.bfloat16)
    found = compiler.estimate_speedup(model, x)
    assert [(each.name, each.rows) for each in found.layers] == [("0", 28), ("2", 28), ("3", 28)]
    assert [each.before > each.after for each in found.layers] == [True, True, False]
    assert compiler.estimate_speedup(compiler.prepare_for_inference(model), x) == found
    assert compiler.estimate_speedup(model, 28) == found


def test_nothing_is_estimated_of_a_product_without_published_peaks(monkeypatch, model):
    simulate(monkeypatch, FakeDevice(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"))
    with pytest.raises(InputError, match=r"no peaks are known of NVIDIA H100 80GB HBM3 MIG"):
        FP8Compiler().estimate_speedup(model, 16)


def test_compiled_it_gives_the_same_numbers_and_what_is_not_in_fp8_is_refused(model):
    compiler = FP8Compiler(target="H100")
    engine = compiler.prepare_for_inference(model)
    x = torch.randn(16, 128, dtype=torch.bfloat16)
    compiled = compiler.compile(engine, backend="aot_eager", fullgraph=True)
    assert compiled is not engine.model
    with torch.no_grad():
        assert torch.equal(compiled(x), engine(x))
    for refused, message in ((model, "must come from"), (3, "needs a model or an engine; got int")):
        with pytest.raises(InputError, match=message):
            compiler.compile(refused)


def test_prepared_for_training_it_learns_in_fp8(model):
    compiler = FP8Compiler(target="H100")
    x, y = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(64, 10, dtype=torch.bfloat16)
    engine = compiler.prepare_for_training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [isinstance(model[place], FP8TrainingLinear) for place in (0, 2, 3)] == [True, True, False]
    found = compiler.statistics(engine)
    assert (found.layers, found.error, list(found.left)) == (2, None, ["3"])
    assert found.bytes_before == found.bytes_after == 2 * (128 * 256 + 256 + 256 * 64 + 64)
    losses = []
    for _ in range(10):
        loss = nn.functional.mse_loss(engine(x), y)
        assert engine.step(loss).outcome == "taken"
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_measuring_runs_both_and_gives_their_ratio(model):
    compiler = FP8Compiler(target="H100")
    calls = []
    prepared = compiler.prepare_for_inference(model)
    model.register_forward_hook(lambda *_: calls.append("original"))
    prepared.model.register_forward_hook(lambda *_: calls.append("prepared"))
    ratio, error = compiler.measure(model, prepared, torch.randn(4, 128, dtype=torch.bfloat16), seconds=0.01)
    assert calls.count("original") == calls.count("prepared") >= 5
    assert ratio > 0
    assert error >= 0
