"""Replays judge rightly: no false alarm between sound ways to run a model, and every planted fault is found."""

import copy
import math

import pytest
import torch
from faulty_kernels import inputs, marked, mixtral, qwen3
from torch import nn

from kpt_cli.errors import CliError
from kpt_cli.validate.models import Arm
from kpt_cli.validate.observing import widened
from kpt_cli.validate.replaying import record, replay
from kpt_core.shared_config import SwitchWatch
from kpt_moe import MoEConfig, MoELayer

REFERENCE = Arm.parse("reference")
EXPERTS = "model.layers.1.mlp.experts"


def verdict_of(found, key):
    return next(verdict for verdict in found.verdicts if verdict.key == key)


def hooks_of(model: nn.Module) -> list[object]:
    """Return the hooks of a model but for those that modules served by KPT have for good."""
    hooks = [
        hook
        for part in model.modules()
        for each in (part._forward_hooks, part._forward_pre_hooks)
        for hook in each.values()
    ]
    return [hook for hook in hooks if not isinstance(hook, SwitchWatch)]


class TestNoFalseAlarm:
    @pytest.mark.parametrize("make", [mixtral, qwen3], ids=lambda make: make.__name__)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("recorder", ["eager", "grouped_mm", "kpt"])
    def test_implementations_pass_against_each_other(self, make, dtype, recorder):
        model = make(dtype)
        trace = record(model, inputs(), arm=Arm.parse(recorder), gradients=recorder == "kpt")
        for other in ("eager", "grouped_mm", "kpt", "reference"):
            found = replay(model, trace, arm=Arm.parse(other))
            assert found.ok, [verdict.reason for verdict in found.failed]

    def test_the_same_run_has_the_recorders_errors_exactly(self):
        model = mixtral()
        found = replay(model, record(model, inputs()))
        assert found.ok
        assert all(verdict.run == verdict.recorder for verdict in found.verdicts)
        assert max(verdict.run.max for verdict in found.verdicts) > 0

    def test_layers_of_kpt(self):
        torch.manual_seed(0)
        config = MoEConfig(hidden_size=16, num_experts=4, intermediate_size=24)
        model = nn.Sequential(nn.Linear(16, 16), MoELayer(config), nn.LayerNorm(16))
        trace = record(model, [torch.randn(20, 16)], gradients=True)
        found = replay(model, trace)
        assert found.ok
        assert "moe.experts: kpt_moe.torch_kernels.experts_loop:forward" in verdict_of(found, "1").kernels
        assert {gradient.key for gradient in trace.gradients} == set(dict(model.named_parameters()))


class TestPlantedFaults:
    @pytest.mark.parametrize("fault", ["tail", "coarse"])
    def test_first_failure_is_the_faulty_module(self, faulty, fault):
        model = marked(mixtral(), layer=1)
        trace = record(model, inputs(), arm=REFERENCE)
        assert replay(model, trace, arm=faulty("sound")).ok
        found = replay(model, trace, arm=faulty(fault))
        assert not found.ok
        assert found.failed[0].key == EXPERTS
        assert f"moe.experts: faulty_kernels:{fault}" in found.failed[0].kernels
        assert found.failed[0].used > 5
        assert [culprit.key for culprit in found.culprits] == [EXPERTS]

    def test_what_is_little_beside_all_errors_is_found_in_the_module_alone(self, faulty):
        model = marked(mixtral(torch.bfloat16), layer=2)
        trace = record(model, inputs(), arm=REFERENCE)
        assert replay(model, trace, arm=faulty("sound")).ok
        found = replay(model, trace, arm=faulty("float8"))
        assert [culprit.key for culprit in found.culprits] == ["model.layers.2.mlp.experts"]
        assert not found.ok

    def test_a_swallowed_nan_fails_though_every_finite_number_is_right(self, faulty):
        model = marked(mixtral(), layer=1)
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[2, 5, 7] = math.nan
        trace = record(model, inputs(), arm=REFERENCE)
        assert trace.layers[-1].outputs[0].isnan().any()
        assert replay(model, trace, arm=faulty("sound")).ok
        found = replay(model, trace, arm=faulty("swallow_nan"))
        assert found.failed[0].key == EXPERTS
        assert "NaN" in found.failed[0].reason

    def test_a_wrong_gradient_fails_though_every_output_is_right(self, faulty):
        model = marked(mixtral(), layer=1)
        trace = record(model, inputs(), arm=REFERENCE, gradients=True)
        assert replay(model, trace, arm=faulty("sound")).ok
        found = replay(model, trace, arm=faulty("wrong_gradient"))
        assert {verdict.type for verdict in found.failed} == {"gradient"}
        assert f"{EXPERTS}.down_proj" in {verdict.key for verdict in found.failed}
        assert "lm_head.weight" not in {verdict.key for verdict in found.failed}

    def test_a_call_that_is_missing_fails(self):
        model = mixtral()
        trace = record(model, inputs())
        model.model.layers[2].mlp.forward = lambda hidden_states: torch.zeros_like(hidden_states)
        found = replay(model, trace)
        assert "this run did not" in verdict_of(found, "model.layers.2.mlp.experts").reason


def coarse_norms():
    model = mixtral()
    model.config.rms_norm_eps = 0.5
    return model


class TestAnotherModel:
    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: marked(mixtral(), layer=1), r"1 of 30 .*model\.layers\.1\.mlp\.experts\.gate_up_proj"),
            (coarse_norms, r"rms_norm_eps \(now 0\.5, recorded 1e-05\)"),
            (qwen3, "a MixtralForCausalLM and this is a Qwen3MoeForCausalLM"),
        ],
    )
    def test_what_differs_is_named(self, make, said):
        trace = record(mixtral(), inputs())
        with pytest.raises(CliError, match=said):
            replay(make(), trace)


class TestRecording:
    def test_the_reference_is_float64_everywhere(self):
        trace = record(mixtral(torch.bfloat16), inputs(), gradients=True)
        assert {tensor.dtype for layer in trace.layers for tensor in layer.reference} == {torch.float64, torch.int64}
        # Norms convert to float32 by themselves; a float64 reference with such a norm would err by 1e-8.
        norm, x = trace.layers[2], trace.layers[2].inputs[0].double()
        assert norm.key == "model.layers.0.input_layernorm"
        exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(norm.reference[0], exact, rtol=1e-14, atol=1e-14)

    def test_the_model_is_as_it_was(self):
        model = mixtral()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        implementation = model.config._experts_implementation
        record(model, inputs(), gradients=True)
        assert model.config._experts_implementation == implementation
        assert torch.get_default_dtype() is torch.float32
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert hooks_of(model) == []

    def test_order_of_execution_and_kernels(self):
        keys = [layer.key for layer in record(mixtral(), inputs()).layers]
        assert keys.index("model.embed_tokens") < keys.index(EXPERTS) < keys.index("model.layers.1") < keys.index("")
        layer = record(mixtral(), inputs()).layers[keys.index(EXPERTS)]
        assert layer.kernels == ("moe.experts: kpt_moe.torch_kernels.experts_loop:forward",)
        assert layer.lengths == (32, 48)

    def test_layers_that_match_and_those_that_route(self):
        model = mixtral()
        trace = record(model, inputs(), layers="model.layers.1*")
        keys = {layer.key for layer in trace.layers}
        assert EXPERTS in keys
        assert "model.layers.0.mlp.gate" in keys
        assert not {"model.layers.0.self_attn", "lm_head"} & keys
        assert replay(model, trace).ok

    def test_a_module_whose_error_is_caught_does_not_shift_the_others(self):
        class Refusing(nn.Module):
            def forward(self, x):
                raise NotImplementedError

        class Trying(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = Refusing(), nn.Linear(8, 8)

            def forward(self, x):
                try:
                    return self.first(x)
                except NotImplementedError:
                    return self.second(x)

        trace = record(Trying(), [torch.randn(4, 8)])
        assert [(layer.key, layer.type) for layer in trace.layers] == [("second", "Linear"), ("", "Trying")]

    def test_the_float64_model_is_made_without_a_narrow_copy(self):
        class Uncopied(nn.Parameter):
            def __deepcopy__(self, memo):
                raise AssertionError("copied as it is")

        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)).bfloat16()
        model[0].weight = model[2].weight = Uncopied(model[0].weight.detach())
        wide = widened(model)
        assert wide[0].weight is wide[2].weight
        assert torch.equal(wide[0].weight, model[0].weight.double())
        assert (wide[1].running_var.dtype, wide[1].num_batches_tracked.dtype) == (torch.float64, torch.int64)
        assert wide[1].running_var is not model[1].running_var

    def test_a_model_that_writes_into_its_inputs_and_buffers(self):
        class Writing(nn.Linear):
            def __init__(self):
                super().__init__(8, 8)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x, seen):
                self.calls += 1
                seen.append(x)
                return super().forward(x.mul_(2)) * len(seen)

        torch.manual_seed(0)
        model, x = Writing(), torch.randn(4, 8)
        fresh_model, before = copy.deepcopy(model), x.clone()
        trace = record(model, [x, []], gradients=True)
        assert torch.equal(x, before)
        assert torch.equal(trace.args[0], before)
        assert trace.args[1] == []
        assert trace.layers[0].reference[0].sub(trace.layers[0].outputs[0]).abs().max() < 1e-5
        assert replay(fresh_model, trace).ok
        assert torch.equal(trace.args[0], before)

    def test_hooks_are_gone_after_an_error(self):
        model = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(CliError, match=r"does not run on the inputs \(recording\): RuntimeError: mat1"):
            record(model, [torch.randn(4, 7)])
        assert hooks_of(model) == []
