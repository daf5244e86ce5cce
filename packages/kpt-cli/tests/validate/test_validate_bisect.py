"""Bisection names the module with the fault, and none that merely follows it."""

import pytest
import torch
from faulty_kernels import choose_the_worst, inputs, marked, mixtral, patch_forward, qwen3

from kpt_cli.validate.models import Arm
from kpt_cli.validate.replaying import bisect, record
from kpt_cli.validate.trace import Trace

REFERENCE = Arm.parse("reference")


@pytest.mark.parametrize("make", [mixtral, qwen3], ids=lambda make: make.__name__)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("fault", ["tail", "coarse"])
def test_exactly_the_faulty_module(faulty, make, layer, fault):
    model = marked(make(), layer)
    trace = record(model, inputs(), arm=REFERENCE)
    assert bisect(model, trace, arm=faulty("sound")) == ()
    (culprit,) = bisect(model, trace, arm=faulty(fault))
    assert culprit.key == f"model.layers.{layer}.mlp.experts"
    assert culprit.kernels == (f"moe.experts: faulty_kernels:{fault}",)
    assert culprit.recorded_kernels == ("moe.experts: reference",)
    assert culprit.inputs[0] == "float32 [24, 32]"
    assert culprit.run.max > culprit.bound.max or culprit.run.mean > culprit.bound.mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sound_implementations_do_not_differ(dtype):
    model = mixtral(dtype)
    trace = record(model, inputs(), arm=Arm.parse("eager"))
    for arm in ("kpt", "grouped_mm", "eager"):
        assert bisect(model, trace, arm=Arm.parse(arm)) == ()


def test_against_a_trace_from_a_file(faulty, tmp_path):
    model = marked(mixtral(), layer=1)
    record(model, inputs(), arm=REFERENCE).save(tmp_path / "trace.safetensors")
    trace = Trace.load(tmp_path / "trace.safetensors")
    (culprit,) = bisect(model, trace, arm=faulty("coarse"))
    assert culprit.key == "model.layers.1.mlp.experts"


def test_a_block_is_blamed_for_its_own_code_only():
    model = mixtral()
    trace = record(model, inputs(), arm=REFERENCE)
    patch_forward(model.model.layers[1], lambda out: out * 1.0001)
    (culprit,) = bisect(model, trace, arm=REFERENCE)
    assert culprit.key == "model.layers.1"


def test_two_faults_in_order_of_execution(faulty):
    model = marked(marked(mixtral(), layer=2), layer=0)
    found = bisect(model, record(model, inputs(), arm=REFERENCE), arm=faulty("coarse"))
    assert [culprit.key for culprit in found] == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


def test_a_block_that_hands_on_what_is_wrong_to_several_is_named_once():
    model = mixtral()
    trace = record(model, inputs(), arm=REFERENCE)
    patch_forward(model.model.layers[1].self_attn, lambda out: out)
    cls = type(model.model.layers[1].self_attn)
    forward = cls.forward
    cls.forward = lambda self, hidden_states, *args, **kwargs: forward(self, hidden_states * 1.0001, *args, **kwargs)
    (culprit,) = bisect(model, trace, arm=REFERENCE)
    assert culprit.key == "model.layers.1.self_attn"
    assert "what it hands to model.layers.1.self_attn.q_proj" in culprit.reason


def test_a_wrong_choice_of_experts():
    model = mixtral()
    trace = record(model, inputs(), arm=REFERENCE)
    patch_forward(model.model.layers[1].mlp.gate, choose_the_worst(3))
    (culprit,) = bisect(model, trace, arm=REFERENCE)
    assert culprit.key == "model.layers.1.mlp.gate"
    assert "1 tokens flipped, not by rounding: at token 3 float64's scores" in culprit.reason


def test_code_that_is_not_the_recorders_is_found_in_every_dtype():
    model = mixtral()
    trace = record(model, inputs(), arm=REFERENCE)
    patch_forward(model.model.layers[1].mlp.gate, lambda out: (out[0] * 1.5, *out[1:]), (torch.float32, torch.float64))
    (culprit,) = bisect(model, trace, arm=REFERENCE)
    assert culprit.key == "model.layers.1.mlp.gate"


@pytest.mark.parametrize("layers", ["*", "model.layers.*"])
def test_code_between_modules_whose_result_no_module_gives(monkeypatch, layers):
    model = mixtral()
    trace = record(model, inputs(), arm=REFERENCE, layers=layers)
    attention = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def wrong_the_second_time(*args, **kwargs):
        calls.append(1)
        return attention(*args, **kwargs) * (1.001 if len(calls) == 2 else 1)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong_the_second_time)
    (culprit,) = bisect(model, trace, arm=REFERENCE)
    assert culprit.key == "model.layers.1.self_attn"
    assert culprit.reason.startswith("what it hands to model.layers.1.self_attn.o_proj: ")
