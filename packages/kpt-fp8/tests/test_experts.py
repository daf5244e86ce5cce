"""Experts of models: 8-bit by op `moe.experts`, and weights that kpt-moe's own experts take as they are."""

import copy

import pytest
import torch
from torch import nn

import kpt_optimize
from kpt_core import InputError, UnknownNameError
from kpt_core.shared_config import warn_of_switch
from kpt_fp8 import (
    FP8InferenceEngine,
    NativeFP8Experts,
    NativeFP8Linear,
    conversion_report,
    convert_model_to_fp8,
    quantize_to_fp8,
)
from kpt_fp8.planner import plan_fp8
from kpt_fp8.quality_report import quality_report

pytest.importorskip("kpt_moe", reason="kpt-moe is not installed")
pytest.importorskip("transformers")
from transformers.integrations.moe import _default_apply_gate


def families():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
    return {
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **sizes, head_dim=16, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
            )
        ),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                **sizes, head_dim=16, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
            )
        ),
    }


def model_of(family):
    torch.manual_seed(0)
    made = families()[family]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    return made


def fused(model):
    return {name: each for name, each in model.named_modules() if name.endswith(".experts")}


class Fused(nn.Module):
    """Experts as transformers fuses them, with what its decorator adds."""

    has_gate, has_post_expert_norm, is_concatenated, is_transposed = True, False, True, False
    _apply_gate = _default_apply_gate

    def __init__(self, bias=False, **facts):
        super().__init__()
        vars(self).update(facts)
        torch.manual_seed(0)
        width = 128 if self.has_gate else 64
        name = "gate_up_proj" if self.has_gate else "up_proj"
        up, down = torch.randn(4, width, 96) / 10, torch.randn(4, 96, 64) / 8
        self.register_parameter(name, nn.Parameter(up.mT.contiguous() if self.is_transposed else up))
        self.down_proj = nn.Parameter(down.mT.contiguous() if self.is_transposed else down)
        if bias:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(4, width)))
            self.down_proj_bias = nn.Parameter(torch.randn(4, 96))
        self.act_fn = nn.SiLU() if self.has_gate else nn.ReLU()

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        name = "gate_up_proj" if self.has_gate else "up_proj"
        for expert in range(4):
            up, down = (
                each[expert].mT if self.is_transposed else each[expert]
                for each in (getattr(self, name), self.down_proj)
            )
            h = nn.functional.linear(
                x, up, getattr(self, f"{name}_bias")[expert] if hasattr(self, f"{name}_bias") else None
            )
            if self.has_gate:
                gate, up = h.chunk(2, -1) if self.is_concatenated else (h[:, ::2], h[:, 1::2])
                h = self.act_fn(gate) * up
            else:
                h = self.act_fn(h)
            bias = self.down_proj_bias[expert] if hasattr(self, "down_proj_bias") else None
            share = torch.where(index == expert, weights, 0).sum(1, keepdim=True)
            out = out + nn.functional.linear(h, down, bias) * share
        return out


class Alternating(Fused):
    """The same with rows of gate and up projection in turn."""

    is_concatenated = False

    def _apply_gate(self, x):
        return self.act_fn(x[..., ::2]) * x[..., 1::2]


def routed(tokens=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 96, generator=generator)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)])
    return x, index, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("granularity", ["row", "128x128"])
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"bias": True},
        {"is_transposed": True, "bias": True},
        {"is_concatenated": False, "bias": True},
        {"has_gate": False, "bias": True},
    ],
)
def test_they_are_the_experts_of_what_the_codes_stand_for(facts, granularity):
    dense = (Fused if facts.get("is_concatenated", True) else Alternating)(**facts)
    model = convert_model_to_fp8(nn.ModuleDict({"experts": dense}), granularity=granularity)
    made = model["experts"]
    assert isinstance(made, NativeFP8Experts)
    exact, halves = copy.deepcopy(dense), not dense.is_concatenated
    with torch.no_grad():
        for name, parts in made.projections():
            numbers = made.dequantize(name)
            whole = getattr(dense, name).mT if dense.is_transposed else getattr(dense, name)
            if halves and parts == 2:
                whole = torch.cat((whole[:, ::2], whole[:, 1::2]), 1)
            # Each matrix by itself, as a checkpoint has it.
            for place, half in enumerate(whole.chunk(parts, 1)):
                expected = quantize_to_fp8(half, granularity=granularity)
                held = getattr(made, name).chunk(parts, 1)[place]
                assert torch.equal(held.view(torch.uint8), expected.codes.view(torch.uint8))
                scales = getattr(made, f"{name}_scale_inv").chunk(parts, 1)[place]
                assert torch.equal(scales.reshape(expected.scale.shape), expected.scale)
            if halves and parts == 2:
                numbers = torch.stack(numbers.chunk(2, 1), 2).flatten(1, 2)
            getattr(exact, name).copy_(numbers.mT if dense.is_transposed else numbers)
    arguments = routed()
    torch.testing.assert_close(made(*arguments), exact(*arguments), rtol=1e-5, atol=1e-5)
    one_by_one = made._one_by_one(*arguments)
    torch.testing.assert_close(one_by_one, exact(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_model_of_transformers(family):
    model = model_of(family)
    changed = convert_model_to_fp8(model)
    assert all(isinstance(each, NativeFP8Experts) for each in fused(changed).values())
    assert fused(changed)
    assert not any(isinstance(each, NativeFP8Experts) for each in fused(model).values())
    tokens = torch.randint(0, 96, (2, 11))
    with torch.no_grad():
        close = torch.nn.functional.cosine_similarity(
            changed(tokens).logits.flatten(), model(tokens).logits.flatten(), 0
        )
    assert 0.99 < close < 1
    (name, layer), *_ = fused(changed).items()
    report = {each.name: each for each in conversion_report(changed).layers}[name]
    assert report.shape == tuple(layer.gate_up_proj.shape)
    assert report.bytes_after < 0.28 * report.bytes_before + 4 * sum(layer.gate_up_proj.shape[:2]) * 4
    assert 28 < report.quality.worst_row_sqnr <= report.quality.sqnr < 36


def test_the_engine_of_experts_alone_has_nothing_to_calibrate():
    model = nn.ModuleDict({"experts": Fused()})
    engine = FP8InferenceEngine(model, activations="tensor", calibration=[])
    assert isinstance(engine.model["experts"], NativeFP8Experts)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_plan_weighs_experts_beside_linear_layers(family):
    model, batches = model_of(family), [torch.randint(0, 96, (2, 12)) for _ in range(2)]
    name = "model.layers.0.mlp.experts"
    # What KPT's own serving leaves behind is no reason to leave experts as they are.
    warn_of_switch(model.get_submodule(name), "_experts_implementation", model.config._experts_implementation)
    assert model.get_submodule(name)._forward_pre_hooks
    planning = plan_fp8(model, batches, max_error=1.0, granularities=["row", "128x128"])
    told = {(layer.name, layer.granularity): layer for layer in planning.sensitivity.layers}
    assert name not in planning.sensitivity.skipped
    assert told[name, "row"].shape == tuple(model.get_submodule(name).gate_up_proj.shape)
    assert told[name, "row"].error > 0
    assert 25 < told[name, "row"].output.sqnr < 40
    # What the plan says a conversion costs is what it costs.
    alone = plan_fp8(model, batches, max_error=1.0, granularities=["row"], include="experts")
    assert [entry.module for entry in alone.plan.kept] == [name]
    converted = kpt_optimize.apply_plan(model, alone.plan).model
    assert isinstance(converted.get_submodule(name), NativeFP8Experts)
    with torch.no_grad():
        pairs = [(converted(batch).logits.double(), model(batch).logits.double()) for batch in batches]
    worst = max(float(((after - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) for after, exact in pairs)
    assert alone.plan.error == pytest.approx(worst, rel=1e-6)
    assert (
        alone.plan.bytes_before - alone.plan.bytes_after
        == told[name, "row"].bytes_before - told[name, "row"].bytes_after
    )
    nothing = plan_fp8(
        model, batches, max_error=told[name, "row"].error * 0.99, granularities=["row"], include="experts"
    )
    assert not nothing.plan.kept


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_quality_report_has_both_weights_of_experts(family):
    model = model_of(family)
    converted = convert_model_to_fp8(model, include="experts")
    report = quality_report(model, converted, [torch.randint(0, 96, (2, 12))])
    name = "model.layers.0.mlp.experts"
    assert {layer.name for layer in report.layers} == {f"{name}.gate_up_proj", f"{name}.down_proj"}
    for layer in report.layers:
        exact = model.get_parameter(layer.name).detach()
        after = converted.get_submodule(name).dequantize(layer.name.rpartition(".")[2])
        errors = ((after - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten()
        assert layer.shape == tuple(exact.shape)
        assert [row.row for row in layer.worst_rows] == errors.topk(3).indices.tolist()
        assert layer.relative_error == pytest.approx(float((after - exact).norm() / exact.norm()), rel=1e-4)
        assert 25 < layer.output.sqnr < 40
    with pytest.raises(InputError, match=r"original must have experts at 'experts'.*got a Linear of other numbers"):
        quality_report(
            nn.ModuleDict({"experts": nn.Linear(4, 4)}), convert_model_to_fp8(nn.ModuleDict({"experts": Fused()}))
        )


def test_in_place_and_by_patterns():
    model = nn.ModuleDict({"experts": Fused(bias=True), "linear": nn.Linear(64, 64)})
    bias = model["experts"].down_proj_bias
    assert not isinstance(convert_model_to_fp8(model, include="linear")["experts"], NativeFP8Experts)
    assert not isinstance(convert_model_to_fp8(model, exclude="experts")["experts"], NativeFP8Experts)
    assert convert_model_to_fp8(model, inplace=True, include="experts") is model
    assert isinstance(model["experts"], NativeFP8Experts)
    assert model["experts"].down_proj_bias is bias
    assert not isinstance(model["linear"], NativeFP8Linear)


def test_what_the_op_does_not_take_is_left(monkeypatch):
    def left(model, **settings):
        return conversion_report(convert_model_to_fp8(model, **settings)).skipped["experts"]

    def made(**facts):
        return nn.ModuleDict({"experts": Fused(**facts), "linear": nn.Linear(64, 64)})

    assert "takes scales per row or 128x128, not mxfp8" in left(made(), granularity="mxfp8")
    assert "not torch.float8_e4m3fnuz" in left(made(), dtype=torch.float8_e4m3fnuz)
    assert "no place for its norm" in left(made(has_post_expert_norm=True))
    odd = made()
    odd["experts"].register_buffer("router_scale", torch.ones(1))
    assert "no place for its router_scale" in left(odd)

    def missing(name):
        raise UnknownNameError("op", name, ())

    monkeypatch.setattr("kpt_fp8.experts.get_op", missing)
    assert left(made()) == "op moe.experts is not there: pip install ./packages/kpt-moe"
    with pytest.raises(InputError, match=r"no layer to convert.*pip install ./packages/kpt-moe"):
        convert_model_to_fp8(nn.ModuleDict({"experts": Fused()}))


def test_bad_numbers_name_the_expert():
    model = nn.ModuleDict({"experts": Fused()})
    model["experts"].down_proj.data[2, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"down_proj of expert 2 of 'experts' must hold .* finite"):
        convert_model_to_fp8(model)


def test_state_dict_dtype_gradients_and_compile():
    made = convert_model_to_fp8(nn.ModuleDict({"experts": Fused(bias=True)}))["experts"]
    state = made.state_dict()
    assert sorted(state) == [
        "down_proj",
        "down_proj_bias",
        "down_proj_scale_inv",
        "gate_up_proj",
        "gate_up_proj_bias",
        "gate_up_proj_scale_inv",
    ]
    assert all(type(each) is torch.Tensor for each in state.values())
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.down_proj.data.view(torch.uint8).zero_()
        other.gate_up_proj_bias.zero_()
    other.load_state_dict(state)
    x, index, weights = routed()
    x.requires_grad_()
    expected = made(x, index, weights)
    assert torch.equal(other(x, index, weights), expected)
    got = torch.autograd.grad(expected.square().sum(), (x, made.down_proj_bias))
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    again = torch.autograd.grad(compiled(x, index, weights).square().sum(), (x, made.down_proj_bias))
    for one, two in zip(got, again, strict=True):
        torch.testing.assert_close(one, two)
    half = other.bfloat16()
    assert (half.down_proj.dtype, half.down_proj_bias.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert half(x.bfloat16(), index, weights).dtype is torch.bfloat16
