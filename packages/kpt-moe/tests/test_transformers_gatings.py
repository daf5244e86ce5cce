"""What is not taken for one of our activations, and that what was found does not outlive a change."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kpt_moe.activations import Activation
from kpt_moe.transformers import NAME, known_activation
from test_transformers_activations import INNER, build, routed, run

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow


class TestOtherGatings:
    """A gating that equals one of ours now, or on small numbers, must not be taken for it."""

    @staticmethod
    def check(module: Any, change) -> None:
        args = routed()
        run(module, NAME, args)
        change(module)
        have, ops = run(module, NAME, args)
        assert ops == {"moe.grouped_mm"}
        torch.testing.assert_close(have[0], run(module, "batched_mm", args)[0][0])

    @staticmethod
    def gated(gate) -> Any:
        module = build("MixtralExperts")
        module._apply_gate = MethodType(lambda self, h: gate(self, *h.chunk(2, dim=-1)), module)
        return module

    @pytest.mark.parametrize("bound", [10.0, 1e3, 1e6])
    def test_a_limit_by_another_name(self, bound):
        module = self.gated(lambda self, g, u: self.act_fn(g.clamp(max=self.bound)) * u)
        module.bound = bound
        assert known_activation(module) is None

    @pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer, lambda tensor: tensor])
    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_scale_that_is_still_one(self, kind, frozen):
        module = self.gated(lambda self, g, u: self.act_fn(g) * u * self.scale)
        module.scale = kind(torch.ones(INNER, dtype=torch.float64))
        module.requires_grad_(not frozen)
        assert known_activation(module) is None
        if not frozen and isinstance(module.scale, nn.Parameter):
            self.check(module, lambda m: nn.init.constant_(m.scale, 3.0))

    def test_a_child_that_does_nothing_yet(self):
        module = self.gated(lambda self, g, u: self.act_fn(g) * self.norm(u))
        module.norm = nn.Identity()
        assert known_activation(module) is None

    def test_an_act_fn_with_parameters(self):
        module = self.gated(lambda self, g, u: F.silu(g) * u * self.act_fn.weight)
        module.act_fn = nn.PReLU(init=1.0).double()
        assert known_activation(module) is None

    def test_a_number_that_changes(self):
        module = self.gated(lambda self, g, u: self.act_fn(g) * u * self.scale)
        module.scale = 1.0
        assert known_activation(module) == Activation("swiglu")
        self.check(module, lambda m: setattr(m, "scale", 3.0))

    def test_dropout_in_training_alone(self):
        module = self.gated(lambda self, g, u: F.dropout(self.act_fn(g) * u, 0.5, self.training)).eval()
        assert known_activation(module) == Activation("swiglu")
        state = torch.get_rng_state()
        assert known_activation(module.train()) is None
        assert torch.equal(torch.get_rng_state(), state)
        assert known_activation(module.eval()) == Activation("swiglu")


class TestChangesAfterCompilation:
    @pytest.mark.parametrize("dynamic", [None, pytest.param(False, marks=slow), pytest.param(True, marks=slow)])
    @pytest.mark.parametrize("name", ["GptOssExperts", "DeepseekV4Experts"])
    def test_of_the_limit(self, name, dynamic):
        module, (x, index, weights) = build(name, torch.float32), routed(dtype=torch.float32)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        attribute = "limit" if hasattr(module, "limit") else "swiglu_limit"
        for limit in (1.5, 0.5, 0.25):
            setattr(module, attribute, limit)
            want, _ = run(module, "eager", (x, index, weights))
            module.config._experts_implementation = NAME
            torch.testing.assert_close(compiled(x, index, weights), want[0], rtol=1e-4, atol=1e-4)

    def test_of_the_activation(self):
        module, args = build("MixtralExperts", torch.float32), routed(dtype=torch.float32)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for act_fn in (nn.SiLU(), nn.GELU()):
            module.act_fn = act_fn
            want, _ = run(module, "eager", args)
            module.config._experts_implementation = NAME
            torch.testing.assert_close(compiled(*args), want[0], rtol=1e-4, atol=1e-4)
