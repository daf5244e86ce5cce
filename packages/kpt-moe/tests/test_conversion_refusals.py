"""What conversion refuses, with the reason."""

from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from conversion_models import REFUSED, assert_close, assert_same_model, blocks_of, build, logits
from families import FAMILIES
from kpt_core import InputError
from kpt_moe.conversion import to_kpt_layers, to_transformers

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_map_is_refused_by_name(name):
    model = FAMILIES[name].build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(InputError, match=REFUSED[name]):
        to_kpt_layers(model, inplace=True, strict=True)
    with pytest.warns(UserWarning, match=f"{REFUSED[name]}.*It stays as it is"):
        assert to_kpt_layers(model, inplace=True) is model
    assert [type(module) for module in model.modules()] == kinds


def tiny_mixtral(**values: Any) -> MixtralForCausalLM:
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **values)).eval()


def test_jitter_that_experts_see_is_refused():
    with pytest.raises(InputError, match=r"MixtralSparseMoeBlock: .*in training"):
        to_kpt_layers(tiny_mixtral(router_jitter_noise=0.1), strict=True)


class ScaledBlock(type(tiny_mixtral().model.layers[0].mlp)):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.5 * super().forward(hidden_states)


class CappedGate(type(tiny_mixtral().model.layers[0].mlp.gate)):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, index = super().forward(hidden_states)
        return logits.tanh(), weights, index


@pytest.mark.parametrize(
    ("part", "kind", "reason"),
    [
        ("", ScaledBlock, "its result is not the sum"),
        (".gate", CappedGate, "does not give its logits first"),
    ],
)
def test_what_a_block_computes_is_asked_of_it(part, kind, reason):
    model = tiny_mixtral()
    model.get_submodule(f"model.layers.1.mlp{part}").__class__ = kind
    with pytest.warns(UserWarning, match=rf"model\.layers\.1\.mlp .*{reason}"):
        converted = to_kpt_layers(model)
    assert len(blocks_of(converted)) == 1
    assert_close(logits(converted), logits(model))
    assert_same_model(to_transformers(converted), model)


def test_a_replaced_forward_is_refused():
    model = tiny_mixtral()
    block = model.model.layers[0].mlp
    block.forward = block.forward
    with pytest.raises(InputError, match="forward of the block was replaced"):
        to_kpt_layers(model, strict=True)


def test_models_without_a_block_are_refused():
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(InputError, match="LlamaForCausalLM has no Mixture-of-Experts block"):
        to_kpt_layers(dense)
    with pytest.raises(InputError, match="LlamaForCausalLM has no block that to_kpt_layers replaced"):
        to_transformers(dense)


def test_partly_frozen_shared_experts_are_refused():
    model = build("qwen2_moe")
    model.model.layers[0].mlp.shared_expert.up_proj.weight.requires_grad_(False)
    with pytest.raises(InputError, match="some of its projections require gradients"):
        to_kpt_layers(model, strict=True)


def test_a_changed_layer_does_not_go_back():
    converted = to_kpt_layers(build("mixtral"))
    blocks_of(converted)[1].router.top_k = 2
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp was changed since .*MixtralSparseMoeBlock") as refused:
        to_transformers(converted)
    changed = [line[:2] for line in str(refused.value).splitlines()[1:]]
    assert changed == ["- ", "+ "]  # not the whole block twice
