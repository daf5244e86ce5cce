import re
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kpt_core
import kpt_optimize
from kpt_core import InputError
from kpt_fp8 import NativeFP8Linear
from kpt_fp8.rewrites import REWRITES, WEIGHTS
from kpt_optimize import RejectedError

ROW, BLOCK, ACTIVATIONS, *_ = REWRITES
NO_GAIN = "slower|as fast|too noisy"


@pytest.fixture
def installed(monkeypatch):
    """This package alone, as its pyproject.toml offers it, whatever else is installed and since when."""
    groups = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]

    def entry_points(group):
        return [EntryPoint(name, value, group) for name, value in groups.get(group, {}).items()]

    monkeypatch.setattr("kpt_core.discovery.entry_points", entry_points)
    kpt_core.refresh()
    yield
    monkeypatch.undo()
    kpt_core.refresh()


def sites(model):
    found = [[site.module for site in rewrite.sites(model)] for rewrite in (ROW, BLOCK, ACTIVATIONS)]
    assert found[0] == found[1] == found[2]
    return found[0]


class Reading(nn.Module):
    """As T5's feed-forward layer, which converts to the dtype of a weight."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.wo(self.wi(x).to(self.wo.weight.dtype))


def test_sites_are_what_can_be_converted():
    shared = nn.Linear(64, 64)
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(64, 128),
            "narrow": nn.Linear(64, 64).to(torch.float16),
            "small": nn.Linear(64, 32),
            "hooked": hooked,
            "meta": nn.Linear(64, 64, device="meta"),
            "first": shared,
            "second": shared,
            "reading": Reading(),
            "encoder": nn.TransformerEncoderLayer(64, 2, 128),
        }
    )
    assert sites(model) == ["plain", "narrow", "first", "reading.wi"]
    assert sites(nn.Linear(64, 64)) == []


def test_what_a_fused_path_reads_is_no_site_though_it_is_shared_with_what_calls_it():
    layer = nn.Linear(64, 64)
    reading = Reading()
    reading.wo = layer
    assert sites(nn.ModuleDict({"calling": nn.Sequential(layer), "reading": reading})) == ["reading.wi"]


@pytest.mark.parametrize("granularity", ["row", "128x128"])
def test_replacement_is_the_converted_layer(granularity):
    torch.manual_seed(0)
    linear = nn.Linear(96, 64)
    before = linear.weight.detach().clone()
    made = WEIGHTS[granularity].replacement(linear)
    wanted = NativeFP8Linear.from_linear(linear, granularity=granularity)
    assert made.granularity == granularity
    x = torch.randn(3, 96)
    assert torch.equal(made(x), wanted(x))
    assert torch.equal(linear.weight, before)


def test_activations_are_added_to_the_codes_that_are_there():
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    layer = ROW.replacement(linear)
    twin = ACTIVATIONS.replacement(layer)
    assert twin.weight.codes.data_ptr() == layer.weight.codes.data_ptr()
    assert twin.bias is layer.bias
    assert (twin.activations, layer.activations) == ("row", "none")
    x = torch.randn(3, 64)
    assert torch.equal(twin(x), ACTIVATIONS.replacement(linear)(x))
    assert not torch.equal(twin(x), layer(x))


def test_what_is_8_bit_already_is_left():
    layer = ROW.replacement(nn.Linear(64, 64))
    for rewrite, given in ((ROW, layer), (BLOCK, layer), (ACTIVATIONS, BLOCK.replacement(nn.Linear(64, 64)))):
        with pytest.raises(RejectedError, match="8-bit already"):
            rewrite.replacement(given)
    with pytest.raises(InputError, match=r"must be an nn\.Linear; got ReLU"):
        ROW.replacement(nn.ReLU())


def model_of():
    """Outputs of the first layers have one large feature each, as those of trained models."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias[0] = 20
        model[2].weight[:, 0] = 0.05
    return model.eval()


def test_optimize_for_memory_keeps_what_the_budget_allows(installed, tmp_path):
    model, x = model_of(), torch.randn(16, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = {}
    for level in ("conservative", "balanced", "aggressive"):
        optimized = kpt_optimize.optimize(model, level, "memory", example_inputs=x)
        kept[level] = {entry.module for entry in optimized.plan.kept}
        assert {entry.op for entry in optimized.plan.entries} <= {"fp8.linear"}
        for entry in optimized.plan.kept:
            assert isinstance(optimized.model.get_submodule(entry.module), NativeFP8Linear)
        with torch.no_grad():
            error = (optimized.model(x) - model(x)).abs().max() / model(x).abs().max()
        assert error <= optimized.plan.max_error
    assert kept["conservative"] == set()
    # A budget of its own: by the 2 % of the level two of three layers stay.
    assert kept["balanced"] == {"0", "2", "4"}
    strict = kpt_optimize.optimize(model, "balanced", "memory", example_inputs=x, max_error=2e-2).plan
    assert {entry.module for entry in strict.kept} == {"0", "2"}
    assert kept["aggressive"] == {"0", "2", "4"}
    assert optimized.plan.bytes_after < 0.3 * optimized.plan.bytes_before
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    optimized.plan.save(tmp_path / "plan.json")
    applied = kpt_optimize.apply_plan(model, tmp_path / "plan.json")
    with torch.no_grad():
        assert torch.equal(applied.model(x), optimized.model(x))
        applied.revert("2")
        assert type(applied.model[2]) is nn.Linear
        applied.revert()
        assert torch.equal(applied.model(x), model(x))


@pytest.fixture
def cpu_clock(monkeypatch):
    """Other work on the machine does not count."""
    monkeypatch.setattr("kpt_optimize.measure.time", SimpleNamespace(perf_counter=time.process_time))


@pytest.fixture
def slow_linear(monkeypatch, cpu_clock):
    """Products of many rows with a float weight cost forty times what they do; so they are slower than 8-bit ones."""
    product = nn.functional.linear

    def linear(x, weight, bias=None):
        for _ in range(39 if x.shape[0] > 1 else 0):
            product(x, weight, bias)
        return product(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)


def test_optimize_for_latency_takes_back_what_is_slower(installed, cpu_clock):
    # A row of float32 is read faster than it is decoded here.
    plan = kpt_optimize.optimize(model_of(), "balanced", example_inputs=torch.randn(1, 64)).plan
    assert plan.entries
    for entry in plan.entries:
        assert not entry.kept
        assert re.search(rf"exceeds the budget|{NO_GAIN}", entry.reason)
    assert any(re.search(NO_GAIN, entry.reason) for entry in plan.entries)


def test_optimize_for_latency_keeps_what_is_faster(installed, slow_linear):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval()
    plan = kpt_optimize.optimize(model, "aggressive", example_inputs=torch.randn(128, 512)).plan
    assert {entry.module for entry in plan.kept if entry.rewrite == "fp8.linear"} == {"0", "1"}
    assert all(entry.gain > 1 for entry in plan.kept)
    assert plan.gain > 1


def test_a_weight_with_nan_is_a_sentence_in_the_plan(installed):
    model = model_of()
    with torch.no_grad():
        model[4].weight[3, 3] = float("nan")
    entries = kpt_optimize.optimize(model, "balanced", "memory", example_inputs=torch.randn(4, 64)).plan.entries
    last = next(entry for entry in entries if entry.module == "4")
    assert not last.kept
    assert "NaN" in last.reason


def test_the_package_offers_them(installed):
    assert list(kpt_optimize.rewrites()) == [rewrite.name for rewrite in REWRITES]
