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
    FP8Tensor,
    NativeFP8Experts,
    NativeFP8Linear,
    conversion_report,
    convert_model_to_fp8,
    quantize_to_fp8,
)
from kpt_fp8.planner import plan_fp8
from kpt_fp8.quality_report import quality_report

kpt_moe = pytest.importorskip("kpt_moe", reason="kpt-moe is not installed")


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

    def _apply_gate(self, x):
        raise NotImplementedError

    _apply_gate.__qualname__ = "_default_apply_gate"

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
        {"is_concatenated": False},
        {"has_gate": False, "bias": True},
    ],
)
def test_they_are_the_experts_of_what_the_codes_stand_for(facts, granularity):
    dense = Fused(**facts)
    model = convert_model_to_fp8(nn.ModuleDict({"experts": dense}), granularity=granularity)
    made = model["experts"]
    assert isinstance(made, NativeFP8Experts)
    exact = copy.deepcopy(dense)
    with torch.no_grad():
        for name, weight in (
            ("gate_up_proj" if dense.has_gate else "up_proj", made.gate_up_proj),
            ("down_proj", made.down_proj),
        ):
            numbers = weight.dequantize()
            getattr(exact, name).copy_(numbers.mT if dense.is_transposed else numbers)
    arguments = routed()
    torch.testing.assert_close(made(*arguments), exact(*arguments), rtol=1e-5, atol=1e-5)
    whole = next(p for n, p in dense.named_parameters() if n.endswith("up_proj"))
    expected = quantize_to_fp8(whole.mT if dense.is_transposed else whole, granularity=granularity)
    assert torch.equal(made.gate_up_proj.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(made.gate_up_proj.scale, expected.scale)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
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
    assert report.bytes_after < 0.26 * report.bytes_before + 4 * sum(layer.gate_up_proj.shape[:2]) * 4
    assert 28 < report.quality.worst_row_sqnr <= report.quality.sqnr < 36


def test_a_gate_of_its_own_is_left_and_the_report_says_so():
    model = model_of("gpt_oss")
    changed = convert_model_to_fp8(model)
    (name, layer), *_ = fused(changed).items()
    assert not isinstance(layer, NativeFP8Experts)
    assert "op moe.experts has no such activation" in conversion_report(changed).skipped[name]


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


def test_a_plan_says_why_experts_are_left():
    model = model_of("gpt_oss")
    skipped = plan_fp8(model, [torch.randint(0, 96, (1, 8))], max_error=1.0).sensitivity.skipped
    assert "op moe.experts has no such activation" in skipped["model.layers.0.mlp.experts"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_quality_report_has_both_weights_of_experts(family):
    model = model_of(family)
    converted = convert_model_to_fp8(model, include="experts")
    report = quality_report(model, converted, [torch.randint(0, 96, (2, 12))])
    name = "model.layers.0.mlp.experts"
    assert {layer.name for layer in report.layers} == {f"{name}.gate_up_proj", f"{name}.down_proj"}
    for layer in report.layers:
        exact = model.get_parameter(layer.name).detach()
        after = getattr(converted.get_submodule(name), layer.name.rpartition(".")[2]).dequantize()
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
    odd = made()
    odd["experts"].act_fn = nn.Tanh()
    assert "no such activation (Tanh)" in left(odd)

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
        "down_proj_scale",
        "gate_up_proj",
        "gate_up_proj_bias",
        "gate_up_proj_scale",
    ]
    assert all(type(each) is torch.Tensor for each in state.values())
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.down_proj.codes.view(torch.uint8).zero_()
        other.gate_up_proj_bias.zero_()
    other.load_state_dict(state)
    x, index, weights = routed()
    x.requires_grad_()
    expected = made(x, index, weights)
    assert torch.equal(other(x, index, weights), expected)
    with pytest.raises(RuntimeError, match="gate_up_proj_scale has no gate_up_proj, and codes mean nothing"):
        other.load_state_dict({name: each for name, each in state.items() if name != "gate_up_proj"})
    got = torch.autograd.grad(expected.square().sum(), (x, made.down_proj_bias))
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    again = torch.autograd.grad(compiled(x, index, weights).square().sum(), (x, made.down_proj_bias))
    for one, two in zip(got, again, strict=True):
        torch.testing.assert_close(one, two)
    half = other.bfloat16()
    assert half.down_proj.dtype is half.down_proj_bias.dtype is torch.bfloat16
    assert half(x.bfloat16(), index, weights).dtype is torch.bfloat16


@pytest.mark.parametrize(("granularity", "scheme"), [("row", "row"), ("128x128", "128x128")])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_go_from_here_to_kpt_moe_and_back(granularity, scheme, dtype):
    """Bit for bit: what one package quantises is what the other does, and each takes the other's."""
    from kpt_moe.experts import experts
    from kpt_moe.quantized_experts import quantize_weights

    up, down = torch.randn(3, 2 * 136, 200), torch.randn(3, 200, 136)
    own = [quantize_to_fp8(each, dtype, granularity) for each in (up, down)]
    theirs = [quantize_weights(each, scheme, dtype) for each in (up, down)]
    for one, (codes, scale) in zip(own, theirs, strict=True):
        assert torch.equal(one.codes.view(torch.uint8), codes.view(torch.uint8))
        assert one.scale.dtype is scale.dtype
        assert torch.equal(one.scale, scale)
    x, index, weights = torch.randn(7, 200), torch.randint(0, 3, (7, 2)), torch.rand(7, 2)
    expected = experts(
        x,
        index,
        weights,
        own[0].codes,
        own[1].codes,
        activation="swiglu",
        gate_up_scale=own[0].scale,
        down_scale=own[1].scale,
    )
    back = NativeFP8Experts(*(FP8Tensor(codes, scale, granularity) for codes, scale in theirs))
    assert torch.equal(back(x, index, weights), expected)
