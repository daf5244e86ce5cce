from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from kpt_vllm.support import ACTIVATIONS, unsupported


def config(activation="silu", use_ep=False, dp_size=1, tp_size=1, **changed):
    known = {
        "activation": Enum("Activation", {"ONE": activation}).ONE,
        "in_dtype": torch.bfloat16,
        "has_bias": False,
        "is_lora_enabled": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "moe_parallel_config": SimpleNamespace(use_ep=use_ep, dp_size=dp_size, tp_size=tp_size),
    }
    return SimpleNamespace(**known | changed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_usual_layers_are_served(activation):
    assert unsupported(config(activation)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"activation": "swigluoai"}, "activation 'swigluoai' is none of silu, gelu, gelu_tanh"),
        ({"activation": "relu2_no_mul"}, "activation 'relu2_no_mul'"),
        ({"swiglu_limit": 7.0}, "the activation has parameters"),
        ({"swiglu_alpha": 1.702}, "the activation has parameters"),
        ({"swiglu_beta": 0.0}, "the activation has parameters"),
        ({"has_bias": True}, "biases"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"in_dtype": torch.float8_e4m3fn}, "the dtype is torch.float8_e4m3fn"),
        *(({each: 2}, "parallelism were not tried") for each in ("use_ep", "dp_size", "tp_size")),
    ],
)
def test_other_layers_are_refused_with_the_reason(changed, reason):
    assert reason in unsupported(config(**changed))


@pytest.mark.parametrize("name", ["activation", "swiglu_alpha", "moe_parallel_config"])
def test_a_vllm_of_other_names_keeps_its_layers(name):
    other = config()
    delattr(other, name)
    assert f"does not fit this vLLM ('types.SimpleNamespace' object has no attribute '{name}')" in unsupported(other)
