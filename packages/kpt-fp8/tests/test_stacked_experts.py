"""Experts that transformers stacks in one tensor: converted matrix by matrix, joined again, calibrated, loaded."""

import pytest
import torch
from torch.nn import functional as F

from kpt_core import InputError
from kpt_fp8 import NativeFP8Experts, calibrate

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from checkpoint_files import config_of, tensors_of
from family_models import FAMILIES
from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint
from kpt_fp8.transformers import load
from transformers_models import sqnr

#: Renamed, transposed and interleaved with biases, transposed, transposed in the files alone, renamed and transposed.
LAYOUTS = ("GraniteMoe", "gpt-oss", "Llama4", "Qwen3-VL-MoE", "Aria")
IDS = torch.arange(48).reshape(2, 24) % 32


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in (*LAYOUTS, "Qwen3-MoE"):
        FAMILIES[name].made().save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_come_back_as_they_were_stacked(name, sources, tmp_path):
    report = convert_checkpoint(sources / name, tmp_path / "fp8", to="compressed-tensors")
    assert any("written matrix by matrix" in note for note in report.notes)
    assert not any("stay as they are" in note for note in report.notes)
    assert not check_checkpoint(tmp_path / "fp8")
    convert_checkpoint(tmp_path / "fp8", tmp_path / "wide", to="float32")
    before, after = tensors_of(sources / name), tensors_of(tmp_path / "wide")
    assert {key: each.shape for key, each in before.items()} == {key: each.shape for key, each in after.items()}
    assert all(sqnr(after[key].float(), each.float()) > 25 for key, each in before.items())
    assert "stacked_experts" not in config_of(tmp_path / "wide")
    convert_checkpoint(tmp_path / "wide", tmp_path / "again", to="compressed-tensors")
    again = tensors_of(tmp_path / "again")
    assert all(torch.equal(again[key], each) for key, each in tensors_of(tmp_path / "fp8").items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_saved_as_they_were_loaded(name, sources, tmp_path):
    convert_checkpoint(sources / name, tmp_path / "fp8", to="fp8", granularity="tensor")
    load(tmp_path / "fp8", dtype=torch.float32).save_pretrained(tmp_path / "again")
    before, after = tensors_of(tmp_path / "fp8"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key].float(), each.float()) for key, each in before.items())
    assert config_of(tmp_path / "again")["stacked_experts"] == config_of(tmp_path / "fp8")["stacked_experts"]


def test_they_stay_stacked_where_one_of_them_is_excluded(sources, tmp_path):
    report = convert_checkpoint(sources / "gpt-oss", tmp_path / "out", to="compressed-tensors", exclude="*.down_proj")
    assert any("stay as they are: model.layers.0.mlp.experts" in note for note in report.notes)
    assert tensors_of(tmp_path / "out")["model.layers.0.mlp.experts.gate_up_proj"].dtype is torch.float32
    assert load(tmp_path / "out")(IDS).logits.isfinite().all()


def _inside(experts, gate_up):
    """Apply gpt-oss's gate, or SwiGLU, to rows of gate and up projection."""
    if hasattr(experts, "limit"):
        gate, up = gate_up[..., ::2].clamp(max=experts.limit), gate_up[..., 1::2].clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt-oss", "Qwen3-MoE"])
def test_calibration_finds_their_scales_and_they_are_applied(name, sources, tmp_path):
    model = FAMILIES[name].made()
    experts, calls = model.model.layers[-1].mlp.experts, []
    handle = experts.register_forward_pre_hook(lambda _, args: calls.append(args))
    scales, experts_of_last = calibrate(model, [IDS]), "model.layers.1.mlp.experts"
    handle.remove()
    model.save_pretrained(tmp_path / "source")
    ((x, index, weights),) = calls
    found = {part: scales[f"{experts_of_last}.{part}"] for part in ("0.gate_proj", "0.up_proj", "0.down_proj")}
    rows = x[(index == 0).any(-1)]
    matrix = experts.gate_up_proj[0] if name == "gpt-oss" else experts.gate_up_proj[0].mT
    bias = experts.gate_up_proj_bias[0] if name == "gpt-oss" else 0
    inside = _inside(experts, rows @ matrix + bias)
    assert found["0.gate_proj"] == found["0.up_proj"] == pytest.approx(float(rows.abs().max() / 448), rel=1e-6)
    assert found["0.down_proj"] == pytest.approx(float(inside.abs().max() / 448), rel=1e-6)

    arguments = {"to": "modelopt", "granularity": "tensor", "input_scales": scales}
    convert_checkpoint(tmp_path / "source", tmp_path / "static", **arguments)
    loaded = load(tmp_path / "static", dtype=torch.float32, quantize_activations=True).get_submodule(experts_of_last)
    convert_checkpoint(tmp_path / "static", tmp_path / "wide", to="float32")
    twin = type(model).from_pretrained(tmp_path / "wide", dtype=torch.float32).get_submodule(experts_of_last)

    def rounded(x, part):
        scale = scales[f"{experts_of_last}.{part}"]
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float64) * scale

    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(twin.num_experts):
        up, down = (getattr(twin, each)[expert].double() for each in ("gate_up_proj", "down_proj"))
        up, down = (up, down) if name == "gpt-oss" else (up.mT, down.mT)
        gate_up = rounded(x, f"{expert}.gate_proj") @ up
        gate_up = gate_up + twin.gate_up_proj_bias[expert] if name == "gpt-oss" else gate_up
        out = rounded(_inside(twin, gate_up).float(), f"{expert}.down_proj") @ down
        out = out + twin.down_proj_bias[expert] if name == "gpt-oss" else out
        total += out * (weights * (index == expert)).sum(-1, keepdim=True)
    assert sqnr(loaded(x, index, weights), total) > 60
    assert sqnr(twin(x, index, weights), total) < 40  # where activations are not rounded


def test_an_expert_that_no_token_reached_has_the_largest_scale_of_the_others():
    model = FAMILIES["Qwen3-MoE"].made()
    model.model.layers[0].mlp.gate.weight.data[2] = -10 * model.model.layers[0].mlp.gate.weight.data.abs().max()
    seen = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    scales = calibrate(model, [IDS[:1, :2]])
    (index,) = seen
    missing = next(expert for expert in range(4) if not bool((index == expert).any()))
    name = "model.layers.0.mlp.experts.{}.down_proj"
    assert scales[name.format(missing)] == max(scales[name.format(each)] for each in range(4) if each != missing)


def test_another_implementation_of_8_bit_experts_is_refused_by_name(sources, tmp_path):
    convert_checkpoint(sources / "gpt-oss", tmp_path / "out", to="compressed-tensors")
    model = load(tmp_path / "out", experts_implementation="grouped_mm")
    with pytest.raises(InputError, match=r"experts_implementation='grouped_mm' does not run 8-bit experts"):
        model(IDS)


def test_experts_with_parts_that_have_no_8_bit_form_are_refused():
    experts = FAMILIES["Qwen3-MoE"].made().model.layers[0].mlp.experts
    experts.register_parameter("scale_of_each", torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(InputError, match="no 8-bit form: there is no place for its scale_of_each"):
        NativeFP8Experts(experts)
