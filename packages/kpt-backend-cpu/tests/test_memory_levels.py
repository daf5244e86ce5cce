"""Levels of activation checkpointing on models of transformers with KPT's kernels: predicted against measured."""

import copy

import pytest
import torch
from torch.optim import AdamW

from kpt_conformance.checks.cost import peak_bytes
from kpt_optimize.memory import LEVELS, checkpoint_blocks, compare_levels

transformers = pytest.importorskip("transformers")
for name in ("kpt_attention.transformers", "kpt_moe.transformers", "kpt_backend_cpu"):
    pytest.importorskip(name)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, vocab_size=128
    )
    ids = torch.randint(0, 128, (2, 256))
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="kpt")
    return model, {"input_ids": ids, "labels": ids}


def moe():
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, vocab_size=128,
    )  # fmt: skip
    ids = torch.randint(0, 128, (2, 256))
    options = {"attn_implementation": "kpt", "experts_implementation": "kpt"}
    model = transformers.Qwen3MoeForCausalLM._from_config(config, **options)
    return model, {"input_ids": ids, "labels": ids}


def gradients(model, inputs):
    model.train().zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def measured(model, inputs):
    """Bytes that a second step takes at most, beside parameters, buffers, inputs and the optimiser's state."""
    optimizer = AdamW(model.parameters())

    def step():
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return peak_bytes(torch.device("cpu"), step)


@pytest.mark.parametrize("make", [llama, moe])
def test_each_level_is_predicted_and_changes_no_gradient(make):
    torch.manual_seed(0)
    model, inputs = make()
    plain = gradients(model, inputs)
    model.zero_grad()
    levels = compare_levels(model, inputs)
    for each in levels:
        checkpoint_blocks(model, each.level)
        for name, grad in gradients(model, inputs).items():
            assert torch.equal(grad, plain[name]), (each.level, name)
        model.zero_grad()
        memory = each.memory
        predicted = memory.peak - memory.parameters - memory.buffers - memory.inputs - memory.optimizer_state
        assert predicted == pytest.approx(measured(copy.deepcopy(model), inputs), rel=0.1), each.level
    assert [each.level for each in levels] == list(LEVELS)
    activations = [each.memory.activations for each in levels]
    assert activations == sorted(activations, reverse=True)
    assert activations[-1] < 0.2 * activations[0]


def test_saved_experts_and_attention_are_not_computed_again():
    levels = {each.level: each.flops for each in compare_levels(*moe())}
    assert levels["none"] == levels["products"] == 1 < levels["kernels"] < levels["experts"] < levels["full"] < 1.34
