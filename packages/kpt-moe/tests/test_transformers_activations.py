"""Which activation each experts class of transformers is found to have, and that its experts then compute the same."""

import importlib
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN

from kpt_core import record
from kpt_moe.activations import Activation
from kpt_moe.transformers import NAME, known_activation

#: Classes whose gating or norm is their own; everything else must be one of our activations.
COMPOSED = {"BeamExperts", "Inkling2Experts", "Inkling2LoopExperts", "MuseSparkExperts"}
#: Classes of transformers 5.24.
NEW = {"Inkling2LoopExperts"}
#: Classes that convert to float32 inside, whatever the dtype of the model.
IN_FLOAT32 = COMPOSED | {"OpenAIPrivacyFilterExperts"}

EXPERTS, HIDDEN, INNER = 4, 8, 6


def decorated() -> dict[str, str]:
    """Class name to module of every class under `@use_experts_implementation`, read from the sources."""
    pattern = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)", re.MULTILINE)
    models = Path(transformers.__file__).parent / "models"
    return {
        name: f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(models.glob("*/modeling_*.py"))
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }


DECORATED = decorated()


def config(**changes: Any) -> SimpleNamespace:
    """Every attribute that any of the classes reads."""
    sizes = dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN)
    sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), EXPERTS)
    values = {
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_hidden_act": "relu2",
        "swiglu_limit": 1.5,
        "swiglu_alpha": 1.702,
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "post_norm_eps": 1e-6,
        "moe_latent_size": None,
        "_experts_implementation": "eager",
    }
    return SimpleNamespace(**{**sizes, **values, **changes})


@cache
def experts_class(name: str) -> type[nn.Module]:
    found: type[nn.Module] = getattr(importlib.import_module(DECORATED[name]), name)
    return found


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    module = experts_class(name)(config(**changes))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def routed(tokens: int = 13, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN, dtype=dtype), index, torch.rand(tokens, 2, dtype=dtype)


def run(module: Any, implementation: str, args: tuple[Tensor, Tensor, Tensor]) -> tuple[list[Tensor], set[str]]:
    """Output and all gradients, and the ops that were called."""
    module.config._experts_implementation = implementation
    x, index, weights = args
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with record() as log:
        out = module(x, index, weights)
        grads = torch.autograd.grad(out.sin().sum(), [x, weights, *module.parameters()])
    return [out.detach(), *grads], {selection.op.removesuffix("_wgrad") for selection in log}


def test_the_sources_were_found():
    assert len(DECORATED) >= 60
    assert set(DECORATED) >= {"MixtralExperts", "GptOssExperts", "NemotronHExperts", "AriaExperts", *COMPOSED - NEW}


@pytest.mark.parametrize("name", DECORATED)
def test_every_class(name):
    module = build(name)
    assert (known_activation(module) is None or module.has_post_expert_norm) == (name in COMPOSED)
    args = routed()
    want, none = run(module, "eager", args)
    have, ops = run(module, NAME, args)
    assert none == set()
    assert ops == {"moe.grouped_mm" if name in COMPOSED else "moe.experts"}
    tolerance = 1e-5 if name in IN_FLOAT32 else 1e-12
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MixtralExperts", Activation("swiglu")),
        ("Gemma4TextExperts", Activation("geglu_tanh")),
        ("Lfm2MoeExperts", Activation("swiglu")),
        ("NemotronHExperts", Activation("relu2")),
        ("DeepseekV4Experts", Activation("swiglu", 1.0, 0.0, 1.5)),
        ("HYV4Experts", Activation("swiglu", 1.0, 0.0, 1.5)),
        ("MiniMaxM3VLExperts", Activation("swiglu", 1.702, 1.0, 1.5)),
        ("OpenAIPrivacyFilterExperts", Activation("swiglu", 1.702, 1.0, 1.5)),
        ("GptOssExperts", Activation("swiglu", 1.702, 1.0, 1.5, interleaved=True)),
        ("BeamExperts", None),
        ("Inkling2Experts", None),
    ],
)
def test_what_is_found(name, expected):
    assert known_activation(build(name)) == expected


#: The names that a configuration may give, and what they are here, gated.
NAMES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
    "gelu_new": None,
    "gelu_fast": None,
    "quick_gelu": None,
    "gelu_python": None,
    "mish": None,
    "tanh": None,
    "relu2": None,
    "linear": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_an_activation(name):
    assert name in ACT2FN
    module = build("MixtralExperts", hidden_act=name)
    found = known_activation(module)
    assert (found and found.name) == NAMES[name]
    args = routed()
    want, _ = run(module, "eager", args)
    have, _ = run(module, NAME, args)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "gelu_new", "sigmoid"])
def test_every_name_of_a_plain_activation(name):
    module = build("NemotronHExperts", mlp_hidden_act=name)
    found = known_activation(module)
    assert (found and found.name) == {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": None, "sigmoid": None}.get(
        name, name
    )
    args = routed()
    torch.testing.assert_close(run(module, NAME, args)[0], run(module, "eager", args)[0])


class TestChanges:
    """What was found must not outlive what it was found for."""

    def test_of_the_activation(self):
        module, args = build("MixtralExperts"), routed()
        run(module, NAME, args)
        module.act_fn = nn.GELU()
        assert known_activation(module) == Activation("geglu")
        torch.testing.assert_close(run(module, NAME, args)[0], run(module, "eager", args)[0])

    @pytest.mark.parametrize(("attribute", "value"), [("limit", 0.5), ("alpha", 0.9)])
    def test_of_a_number(self, attribute, value):
        module, args = build("GptOssExperts"), routed()
        before, _ = run(module, NAME, args)
        setattr(module, attribute, value)
        have, _ = run(module, NAME, args)
        assert not torch.allclose(have[0], before[0])
        torch.testing.assert_close(have, run(module, "eager", args)[0])

    def test_of_one_module_do_not_reach_another(self):
        first, second = build("GptOssExperts"), build("GptOssExperts", swiglu_limit=0.5)
        assert known_activation(first) == Activation("swiglu", 1.702, 1.0, 1.5, interleaved=True)
        assert known_activation(second) == Activation("swiglu", 1.702, 1.0, 0.5, interleaved=True)

    def test_of_the_gating_of_one_module(self):
        module, args = build("MixtralExperts"), routed()
        run(module, NAME, args)
        module._apply_gate = lambda h: h[..., :INNER].tanh() * h[..., INNER:]
        assert known_activation(module) is None
        have, ops = run(module, NAME, args)
        assert ops == {"moe.grouped_mm"}
        module.config._experts_implementation = "batched_mm"
        torch.testing.assert_close(have[0], module(*args))


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "Inkling2Experts"])
def test_ids_of_other_ranks_contribute_nothing(name):
    """Under expert parallelism transformers gives experts of other ranks the id `num_experts`."""
    module, (x, index, weights) = build(name), routed()
    away = torch.rand(index.shape) < 0.4
    index = index.masked_fill(away, EXPERTS)
    module._is_expert_parallel = True
    have, _ = run(module, NAME, (x, index, weights.masked_fill(away, float("nan"))))
    want, _ = run(module, "eager", (x, index.masked_fill(away, 0), weights.masked_fill(away, 0.0)))
    assert away.all(1).any()
    assert (have[2][away] == 0).all()
    for a, b in zip((have[0], have[1], *have[3:]), (want[0], want[1], *want[3:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "Inkling2Experts"])
class TestWithoutNumbers:
    """A model that is only described finds the same."""

    def test_fake_tensors(self, name):
        module, args = build(name), routed()
        module.config._experts_implementation = NAME
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert module(*args).shape == (13, HIDDEN)
        assert known_activation(module) == known_activation(build(name))

    def test_meta_device(self, name):
        with torch.device("meta"):
            module, args = experts_class(name)(config(_experts_implementation=NAME)), routed(dtype=torch.float32)
            out = module(*args)
        assert (out.shape, out.device.type) == ((13, HIDDEN), "meta")
        assert known_activation(module) == known_activation(build(name))

    def test_compiled_before_it_ever_ran(self, name):
        module, args = build(name, torch.float32), routed(dtype=torch.float32)
        module.config._experts_implementation = NAME
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = args[0].clone().requires_grad_()
        out = compiled(x, *args[1:])
        grads = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        want, _ = run(module, "eager", args)
        for a, b in zip((out.detach(), *grads), (want[0], want[1], *want[3:]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
