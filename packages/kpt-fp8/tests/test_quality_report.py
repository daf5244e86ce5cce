import json
import math

import pytest
import torch
from torch import nn

from kpt_core import InputError
from kpt_fp8 import conversion_report, convert_model_to_fp8
from kpt_fp8.quality import sqnr
from kpt_fp8.quality_report import quality_report


@pytest.fixture
def model():
    """The weight of the second layer has one number that ruins the scale of its block."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 8))
    with torch.no_grad():
        made[2].weight[7, 3] = 1e4
    return made


def test_weights_worst_first(model):
    converted = convert_model_to_fp8(model, granularity="128x128")
    report = quality_report(model, converted, rows=2)
    assert [layer.name for layer in report.layers] == ["2", "0"]
    told = {layer.name: layer.quality for layer in conversion_report(converted).layers}
    for layer in report.layers:
        assert layer.weight.sqnr == pytest.approx(told[layer.name].sqnr, abs=1e-6)
        assert layer.weight.worst_row_sqnr == pytest.approx(told[layer.name].worst_row_sqnr, abs=1e-6)
        assert layer.output is None
        exact = model.get_submodule(layer.name).weight.detach()
        after = converted.get_submodule(layer.name).dequantize()
        errors = (after - exact).norm(dim=1) / exact.norm(dim=1)
        assert layer.relative_error == pytest.approx(float((after - exact).norm() / exact.norm()), rel=1e-4)
        assert [row.row for row in layer.worst_rows] == errors.topk(2).indices.tolist()
        assert layer.worst_rows[0].sqnr == pytest.approx(layer.weight.worst_row_sqnr, abs=1e-6)
        assert layer.worst_rows[0].relative_error == pytest.approx(float(errors.max()), rel=1e-4)
    # The row with the large number is the only good one.
    assert report.layers[0].weight.worst_row_sqnr < 20 < report.layers[0].weight.sqnr


def test_outputs_on_the_inputs_of_the_original(model):
    converted = convert_model_to_fp8(model)
    batches = [torch.randn(3, 64), torch.randn(5, 64)]
    report = quality_report(model, converted, batches)
    with torch.no_grad():
        hidden = model[1](model[0](torch.cat(batches)))
        wanted = sqnr(model[2](hidden), converted[2](hidden))
    second = next(layer for layer in report.layers if layer.name == "2")
    assert second.output.sqnr == pytest.approx(wanted.sqnr, abs=0.1)
    assert second.output.worst_row_sqnr == pytest.approx(wanted.worst_row_sqnr, abs=0.1)
    rows = [layer.output.worst_row_sqnr for layer in report.layers]
    assert rows == sorted(rows)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_table_json_and_plot(model, tmp_path):
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    report = quality_report(model, convert_model_to_fp8(model), rows=1)
    assert [line.split()[0] for line in str(report).splitlines()] == ["Quality", "layer", "2", "0"]
    report.save(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["layers"][0]["worst_rows"][0]["row"] == report.layers[0].worst_rows[0].row
    exact = document["layers"][1]
    assert math.isinf(report.layers[1].weight.sqnr)
    assert (exact["weight"]["sqnr"], exact["relative_error"]) == (None, 0.0)
    report.plot(tmp_path / "plot.svg")
    assert "2 (row)" in (tmp_path / "plot.svg").read_text()


def test_wrong_input_is_a_sentence(model):
    converted = convert_model_to_fp8(model)
    with pytest.raises(
        InputError, match="converted must have NativeFP8Linear or NativeFP8Experts; got a Sequential without"
    ):
        quality_report(model, model)
    with pytest.raises(InputError, match=r"nn\.Linear of \[128, 64\] at '0'; got a NativeFP8Linear"):
        quality_report(converted, converted)
    other = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(InputError, match=r"at '0'; got an nn\.Linear of \[64, 64\]"):
        quality_report(other, converted)
    with pytest.raises(InputError, match="at '0'; got nothing"):
        quality_report(nn.ModuleDict({"other": nn.Linear(64, 64)}), converted)
    with pytest.raises(InputError, match="data gave no batch"):
        quality_report(model, converted, [])
    with pytest.raises(InputError, match="rows must be at least 0; got -1"):
        quality_report(model, converted, rows=-1)
