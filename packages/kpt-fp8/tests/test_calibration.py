"""Magnitudes, calibration, and conversion with static scales."""

import math

import pytest
import torch
from torch import nn

from kpt_core import InputError, UnknownNameError
from kpt_fp8 import FP8InferenceEngine, calibrate, convert_model_to_fp8
from kpt_fp8.magnitudes import Largest, Magnitudes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 64))


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(count)]


class TestMagnitudes:
    def test_shown_in_parts_they_are_counted_as_at_once(self):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        parts, whole = Magnitudes(), Magnitudes()
        for scale, part in zip((1, 1, 8, 8, 8), x.chunk(5), strict=True):
            parts.add(part * scale)
        whole.add(torch.cat([part * scale for scale, part in zip((1, 1, 8, 8, 8), x.chunk(5), strict=True)]))
        assert (parts.count, parts.most) == (whole.count, whole.most)
        for percent in (50, 90, 99.9, 100):
            assert parts.percentile(percent) == pytest.approx(whole.percentile(percent), abs=0.06)

    @pytest.mark.parametrize("percent", [50, 90, 99])
    def test_a_percentile_is_that_of_the_numbers(self, percent):
        x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        seen = Magnitudes()
        seen.add(x)
        right = torch.quantile(x.abs(), percent / 100).item()
        assert seen.percentile(percent) == pytest.approx(right, abs=seen.most / 1024)

    def test_what_is_not_finite_is_left_out(self):
        seen = Magnitudes()
        seen.add(torch.tensor([math.nan, math.inf, -3.0, 1.0]))
        assert (seen.count, seen.most) == (2, 3.0)

    @pytest.mark.parametrize("first", [2.0e38, 1.0])
    def test_numbers_near_the_largest_of_float32(self, first):
        most = torch.finfo(torch.float32).max
        seen = Magnitudes()
        seen.add(torch.full((100,), first))
        seen.add(torch.tensor([most, -most]))
        assert (seen.count, float(seen._counts.sum())) == (102, 102)
        assert seen.percentile(100) == most
        for method in ("max", "percentile", "mse"):
            assert 0 < seen.scale(torch.float8_e4m3fn, method, 100) <= most / 448
        assert seen.scale(torch.float8_e4m3fn, "mse") > first / 2 / 448

    def test_zeros_alone_have_a_scale(self):
        seen = Magnitudes()
        seen.add(torch.zeros(5))
        assert seen.scale(torch.float8_e4m3fn) == 1.0
        seen.add(torch.tensor([448.0]))
        assert seen.scale(torch.float8_e4m3fn) == 1.0
        assert seen.percentile(80) < 1.0

    def test_the_least_error_clips_what_is_rare_and_far(self):
        torch.manual_seed(0)
        x = torch.cat([torch.randn(50_000), torch.tensor([30.0])])
        seen = Magnitudes()
        seen.add(x)

        def error(scale):
            rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            return (rounded - x).square().mean().item()

        best = seen.scale(torch.float8_e4m3fn, "mse")
        assert error(best) <= 1.02 * min(error(30.0 * part / 64 / 448) for part in range(17, 65))

    def test_more_numbers_than_float32_counts(self):
        seen = Magnitudes()
        for _ in range(2):
            seen.add(torch.cat([torch.full((2**24 + 1000,), 0.001), torch.tensor([60.0])]))
        assert seen._counts.sum() == seen.count
        assert seen.percentile(99.9) < 0.1
        assert seen.percentile(100) == 60


class TestLargest:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_it_is_that_of_the_finite_numbers(self, dtype):
        largest, whole = Largest(), Magnitudes()
        for numbers in ([], [math.nan, -3.0], [math.inf, 1.0], [2.0]):
            largest.add(torch.tensor(numbers, dtype=dtype))
            whole.add(torch.tensor(numbers, dtype=dtype))
        assert largest.scale(torch.float8_e4m3fn) == whole.scale(torch.float8_e4m3fn) == 3.0 / 448

    def test_zeros_have_a_scale_and_nothing_has_none(self):
        seen = Largest()
        seen.add(torch.tensor([math.nan, 1e300], dtype=torch.float64))
        assert not seen.any
        with pytest.raises(InputError, match="no finite number was seen"):
            seen.scale(torch.float8_e4m3fn)
        seen.add(torch.zeros(3))
        assert seen.scale(torch.float8_e4m3fn) == 1.0


def test_the_largest_is_found_without_waiting_for_the_device():
    """On the meta device there is nothing to read back or move: whatever did so would raise."""
    largest = Largest()
    for _ in range(2):
        largest.add(torch.randn(4, 64, device="meta"))
    assert largest._seen.is_meta
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        Magnitudes().add(torch.randn(4, 64, device="meta"))


def test_chosen_layers_alone_are_looked_at(monkeypatch):
    net, data = model(), batches()
    assert set(calibrate(net, data, layers=["3"])) == {"3"}
    assert calibrate(net, data, layers=["3"]) == {"3": calibrate(net, data)["3"]}
    with pytest.raises(InputError, match=r"layers has '2', which is no linear layer.*'0', '3': correct the name"):
        calibrate(net, data, layers=["2"])
    hooked = []
    original = nn.Linear.register_forward_pre_hook
    monkeypatch.setattr(
        nn.Linear, "register_forward_pre_hook", lambda self, *a, **k: hooked.append(self) or original(self, *a, **k)
    )
    FP8InferenceEngine(net, activations="tensor", calibration=data, include="0")
    assert hooked == [net[0]]


def test_the_engine_hands_on_what_calibration_takes():
    net, data = model(), batches(5)
    engine = FP8InferenceEngine(
        net, activations="tensor", calibration=iter(data), method="percentile", percentile=90, max_batches=2
    )
    expected = calibrate(net, data[:2], method="percentile", percentile=90)
    assert float(engine.model[0].input_scale) == pytest.approx(expected["0"])
    with pytest.raises(InputError, match="FP8InferenceEngine: include has 'x'"):
        FP8InferenceEngine(net, activations="tensor", calibration=iter(lambda: pytest.fail("ran"), 0), include="x")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_static_scales_are_for_the_format_of_activations(dtype):
    net, data = nn.Sequential(nn.Linear(64, 64)), batches(1)
    engine = FP8InferenceEngine(net, activations="tensor", calibration=data, dtype=dtype)
    dynamic = FP8InferenceEngine(net, activations="tensor", dtype=dtype)
    torch.testing.assert_close(engine(data[0]), dynamic(data[0]), rtol=1e-5, atol=1e-5)


def test_layers_that_are_called_by_keyword():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(input=x)

    net, data = Named(), batches(1)
    changed = convert_model_to_fp8(net, activations="tensor", input_scales=calibrate(net, data))
    assert changed(data[0]).shape == (16, 64)


def test_scales_are_those_of_what_each_layer_is_given():
    net, data = model().eval(), batches()
    found = calibrate(net, data)
    inputs = torch.cat(data)
    assert found["0"] == pytest.approx(inputs.abs().max().item() / 448)
    assert found["3"] == pytest.approx(net[1](net[0](inputs)).abs().max().item() / 448, rel=1e-5)
    assert calibrate(net, data, method="percentile", percentile=90)["0"] < found["0"]


def test_the_model_is_left_as_it_was():
    net = model()
    net[1].eval()
    calibrate(net, batches())
    assert [module.training for module in net.modules()] == [True, True, False, True, True]
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_it_is_left_as_it_was_where_a_batch_fails():
    net = model()
    with pytest.raises(RuntimeError):
        calibrate(net, [torch.randn(2, 3)])
    assert net.training
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_batches_are_tensors_mappings_or_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, a, b):
            return self.linear(a + b)

    a, b = batches(2)
    found = [calibrate(Two(), [batch]) for batch in ({"a": a, "b": b}, (a, b), [a, b])]
    assert found[0] == found[1] == found[2]


def test_a_converted_model_has_the_scales():
    net, data = model().eval(), batches()
    scales = calibrate(net, data)
    changed = convert_model_to_fp8(net, activations="tensor", input_scales=scales)
    assert changed[0].input_scale.item() == pytest.approx(scales["0"])
    close = nn.functional.cosine_similarity(changed(data[0]).flatten(), net(data[0]).flatten(), 0)
    assert 0.998 < close < 1


def test_progress_and_the_number_of_batches():
    told = []
    calibrate(model(), iter(batches(5)), max_batches=2, progress=told.append)
    assert told == [1, 2]


def test_bad_input():
    net, data = model(), batches(1)
    with pytest.raises(UnknownNameError, match="unknown calibration method 'maximum'"):
        calibrate(net, data, method="maximum")
    with pytest.raises(InputError, match="percentile must be above 0 and up to 100; got 0"):
        calibrate(net, data, method="percentile", percentile=0)
    with pytest.raises(InputError, match="data gave no batch"):
        calibrate(net, [])
    for batch in (data[0], {"input": data[0]}, None):
        with pytest.raises(InputError, match=r"calibrate: data must be a sequence of batches; got one .*: put it in"):
            calibrate(net, batch)
    with pytest.raises(InputError, match="max_batches must be at least 1; got -1"):
        calibrate(net, data, max_batches=-1)
    with pytest.raises(InputError, match=r"calibrate: model must be an nn\.Module; got NoneType"):
        calibrate(None, data)
    with pytest.raises(InputError, match=r"FP8InferenceEngine: model must be an nn\.Module; got NoneType"):
        FP8InferenceEngine(None)
    with pytest.raises(InputError, match=r"model has no nn.Linear; got ReLU"):
        calibrate(nn.ReLU(), data)
    with pytest.raises(InputError, match="no linear layer was called with finite numbers"):
        calibrate(net, [torch.full((2, 64), math.nan)])
    with pytest.raises(InputError, match=r"input_scales are for activations='tensor'.*got activations='row'"):
        convert_model_to_fp8(net, activations="row", input_scales={"0": 1.0})
    with pytest.raises(InputError, match=r"input_scales has 'lin', which is no linear layer.*its 2 are '0', '3'"):
        convert_model_to_fp8(net, activations="tensor", input_scales={"0": 1.0, "3": 1.0, "lin": 1.0})
    with pytest.raises(InputError, match="input_scales has no scale of '3'; got 1 of other layers"):
        convert_model_to_fp8(net, activations="tensor", input_scales={"0": 1.0})
    with pytest.raises(InputError, match=r"calibration is for activations='tensor'.*got activations='none'"):
        FP8InferenceEngine(net, calibration=data)


@pytest.mark.parametrize("settings", [{}, {"activations": "row"}, {"activations": "tensor", "calibration": batches()}])
def test_the_engine_runs_and_says_what_it_saves(settings):
    net = model().eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    engine = FP8InferenceEngine(net, **settings)
    x = batches(1)[0]
    out = engine(x)
    assert out.is_inference()
    assert nn.functional.cosine_similarity(out.flatten(), net(x).flatten(), 0) > 0.998
    assert engine.memory.before == sum(value.numel() * 4 for value in before.values())
    assert 0.7 < engine.memory.saved < 0.75
    assert {layer.name for layer in engine.report.layers} == {"0", "3"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
