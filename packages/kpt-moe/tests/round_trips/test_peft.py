"""peft's LoRA on the experts' parameters."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from round_trip_kinds import MODELS, build, logits, original
from torch import nn

from conversion_models import PROMPT, assert_close
from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.conversion import KptMoEBlock, to_transformers
from kpt_moe.expert_networks import QuantizedFeedForwardExpert

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    # peft 0.21 asks transformers 5.23 by an old name, and says what of its own translation of names was not needed.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
    # Dynamo looks at the gradient of what is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

TARGETS = {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, **{**TARGETS, **options})


def trained(model: Any, **options: Any) -> Any:
    """The model with an adapter after a few steps."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, adapter(**options))
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2)
    first = None
    for _ in range(3):
        loss = adapted(PROMPT, labels=PROMPT).loss
        first = loss if first is None else first
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < first
    return adapted


@pytest.mark.parametrize("name", MODELS)
def test_trains_merges_and_comes_back(name, tmp_path):
    before = logits(build(name))
    model = trained(build(name))
    want = logits(model)
    assert (want - before).abs().max() > 0.05 * before.abs().max()
    model.save_pretrained(tmp_path)

    loaded = PeftModel.from_pretrained(build(name), tmp_path)
    assert torch.equal(logits(loaded), want)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), before)
    merged = model.merge_and_unload()
    assert_close(logits(merged), want)
    assert [type(module) for module in merged.modules()] == [type(module) for module in build(name).modules()]
    assert merged.state_dict().keys() == build(name).state_dict().keys()


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("served", "converted"))])
def test_adapters_are_those_of_the_original(name, tmp_path):
    model = trained(build(name))
    model.save_pretrained(tmp_path / "ours")
    plain = PeftModel.from_pretrained(original(MODELS[name][1]), tmp_path / "ours")
    assert_close(logits(plain), logits(model))
    theirs = trained(original(MODELS[name][1]))
    theirs.save_pretrained(tmp_path / "theirs")
    assert_close(logits(PeftModel.from_pretrained(build(name), tmp_path / "theirs")), logits(theirs))


@pytest.mark.parametrize("name", ["converted mixtral", "converted deepseek_v3"])
def test_a_merged_model_is_saved_under_the_original_names(name, tmp_path):
    model = trained(build(name))
    want = logits(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert_close(logits(type(merged).from_pretrained(tmp_path, dtype=torch.float32)), want)
    assert_close(logits(to_transformers(merged)), want)


def test_routers_and_shared_experts_are_adapted_by_their_original_names():
    targets = {"target_modules": ["shared_expert_gate"], "target_parameters": ["gate.weight"]}
    model = trained(build("converted qwen2_moe"), **targets)
    adapted = {name.split(".mlp.")[1].split(".lora")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"gate", "shared_expert_gate"}
    want = logits(model)
    assert_close(logits(model.merge_and_unload()), want)


@pytest.mark.parametrize("wrap", [torch.compile, nn.Sequential], ids=["compiled", "wrapped"])
def test_a_layer_reads_what_its_experts_need_through_a_wrapper(wrap):
    class Passing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return self.inner(*arguments, **options)

    layer = MoELayer(MoEConfig(hidden_size=16, num_experts=4, expert="convolutional", intermediate_size=8)).eval()
    x = torch.randn(3, 5, 16)
    want = layer(x)
    layer.experts = Passing(layer.experts) if wrap is nn.Sequential else torch.compile(layer.experts, backend="eager")
    torch.testing.assert_close(layer(x), want)
    layer.experts = nn.Linear(16, 16)
    with pytest.raises(InputError, match="must be an ExpertNetwork, or a wrapper of one; got Linear"):
        layer(x)


def in_8_bits() -> Any:
    model = build("converted mixtral")
    for block in model.modules():
        if isinstance(block, KptMoEBlock):
            block.experts = QuantizedFeedForwardExpert.from_feed_forward(block.experts)
    return model


def test_fp8_experts_refuse_an_adapter_and_other_modules_take_it():
    refused = get_peft_model(in_8_bits(), adapter(target_modules=[], target_parameters=["experts.down_proj"]))
    with pytest.raises(InputError, match=r"adds to down_proj of QuantizedFeedForwardExpert.*before they are quantised"):
        logits(refused)
    adapted = trained(in_8_bits(), target_parameters=None)
    want = logits(adapted)
    merged = adapted.merge_and_unload()
    assert_close(logits(merged), want)
    assert all(b.experts.down_proj.dtype is torch.float8_e4m3fn for b in merged.modules() if isinstance(b, KptMoEBlock))
