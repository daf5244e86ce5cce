import pytest
import torch

from checkpoint_files import quantized
from kpt_core import InputError
from kpt_fp8 import NativeFP8Linear, convert_model_to_fp8
from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from family_models import FAMILIES
from kpt_fp8.transformers import load
from transformers_models import IDS, logits, model, sqnr

# PEFT 0.21 asks transformers 5.23 by an old name, and names patterns that experts alone have.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_activation_checkpointing", "ignore:.*_pattern keys")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    model("llama").save_pretrained(made / "llama")
    quantized(made / "fp8", made / "llama", "ct-channel")
    return made / "fp8"


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_an_adapter_trains_is_saved_loaded_and_merged(targets, folder, tmp_path):
    base = load(folder)
    before = logits(base)
    adapted = get_peft_model(base, LoraConfig(target_modules=targets, r=4))
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(adapted(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        assert all(each.grad is not None for each in adapted.parameters() if each.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    trained = logits(adapted.eval())
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    merged, safely = adapted.merge_and_unload(), again.merge_and_unload(safe_merge=True)
    assert isinstance(merged.model.layers[0].self_attn.q_proj, NativeFP8Linear)
    assert torch.equal(logits(merged), logits(safely))
    assert sqnr(trained, logits(merged)) > max(15, sqnr(trained, before) + 5)


METHODS = {"DoRA": {"use_dora": True}, "PiSSA": {"init_lora_weights": "pissa"}, "OLoRA": {"init_lora_weights": "olora"}}


@pytest.mark.parametrize("method", METHODS)
def test_adapters_that_read_the_weights_train_and_merge(method, folder):
    base = load(folder)
    before = logits(base)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **METHODS[method]))
    assert sqnr(before, logits(adapted)) > (20 if method != "DoRA" else 60)  # what is left is quantised anew
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(adapted(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    trained = logits(adapted.eval())
    merged = adapted.merge_and_unload()
    assert isinstance(merged.model.layers[0].self_attn.q_proj, NativeFP8Linear)
    assert sqnr(trained, logits(merged)) > 15


def test_a_merged_adapter_is_taken_out_again():
    whole = convert_model_to_fp8(model("llama"))
    before = logits(whole)
    adapted = get_peft_model(whole, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    adapted.merge_adapter()
    assert sqnr(before, logits(adapted)) < 15
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        assert sqnr(before, logits(adapted)) > 20


TARGETS = [{"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []}]


@pytest.mark.parametrize("targets", [*TARGETS, {"target_modules": "all-linear"}], ids=["parameters", "all-linear"])
@pytest.mark.parametrize("variant", ["fp8-block", "ct-channel", "fp8-tensor-static"])
def test_an_adapter_on_experts_trains_as_on_their_numbers_and_loads_in_plain_peft(variant, targets, tmp_path):
    model("qwen3_moe").save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", variant)
    convert_checkpoint(tmp_path / "out", tmp_path / "wide", to="float32")
    losses, adapted = [], []
    for base in (load(tmp_path / "out"), Qwen3MoeForCausalLM.from_pretrained(tmp_path / "wide")):
        adapted.append(get_peft_model(base, LoraConfig(r=4, lora_alpha=32, init_lora_weights=False, **targets)))
        # PEFT rounds the first numbers of an adapter to what it adapts, before they are float32.
        set_peft_model_state_dict(adapted[-1], get_peft_model_state_dict(adapted[0]))
        losses.append(adapted[-1](input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    ours, theirs = ({n: p.grad for n, p in each.named_parameters() if p.requires_grad} for each in adapted)
    assert any("experts" in name for name in ours)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5 * theirs[name].abs().max().item())
    adapted[0].save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "wide"), tmp_path / "adapter")
    torch.testing.assert_close(logits(plain.eval()), logits(adapted[0].eval()), rtol=1e-4, atol=1e-4)


def test_an_adapter_on_experts_that_are_not_run_by_kpt_is_refused_instead_of_left_untrained(tmp_path):
    model("qwen3_moe").save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", "fp8-block")
    adapted = get_peft_model(load(tmp_path / "out", experts_implementation="eager"), LoraConfig(r=4, **TARGETS[0]))
    with pytest.raises(InputError, match='adapters on 8-bit experts need experts_implementation="kpt"'):
        adapted(input_ids=IDS)


def test_experts_that_were_made_in_memory_take_adapters_too():
    losses, gradients = [], []
    whole = model("qwen3_moe")
    converted = convert_model_to_fp8(whole, include="experts")
    with torch.no_grad():
        for name, module in whole.named_modules():
            for own in ("gate_up_proj", "down_proj") if name.endswith(".experts") else ():
                getattr(module, own).copy_(converted.get_submodule(name).dequantize(own))
    for base in (converted, whole):
        adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, **TARGETS[0]))
        with torch.no_grad():
            for place, each in enumerate(p for p in adapted.parameters() if p.requires_grad):
                each.normal_(std=0.1, generator=torch.Generator().manual_seed(place))
        losses.append(adapted(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        gradients.append([each.grad for each in adapted.parameters() if each.requires_grad])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


def test_adapters_on_experts_in_another_order_are_refused(tmp_path):
    FAMILIES["gpt-oss"].made().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", to="compressed-tensors")
    adapted = get_peft_model(load(tmp_path / "out"), LoraConfig(r=4, **TARGETS[0]))
    with pytest.raises(InputError, match="matrices of GptOssExperts are in another order here"):
        adapted(input_ids=IDS)


@pytest.mark.parametrize("reader", ["load", "transformers"])
def test_a_merged_model_is_saved_and_loads(reader, tmp_path):
    model("llama").save_pretrained(tmp_path / "source")
    quantized(tmp_path / "fp8", tmp_path / "source", "fp8-block")
    adapted = get_peft_model(
        load(tmp_path / "fp8"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert not check_checkpoint(tmp_path / "merged")
    again = load(tmp_path / "merged") if reader == "load" else AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), logits(merged), rtol=1e-2, atol=1e-3)


@pytest.fixture
def one_process(tmp_path):
    """DistributedDataParallel sends weights around in a group of one process too."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", ["llama", "llama, converted", "qwen3_moe"])
def test_an_adapter_trains_in_distributed_data_parallel(kind, tmp_path):
    if "converted" in kind:
        base = convert_model_to_fp8(model("llama"))
    else:
        model(kind).save_pretrained(tmp_path / "source")
        quantized(tmp_path / "out", tmp_path / "source", "fp8-block")
        base = load(tmp_path / "out")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "o_proj"], r=4))
    wrapped = torch.nn.parallel.DistributedDataParallel(adapted)
    wrapped(input_ids=IDS, labels=IDS).loss.backward()
    assert all(each.grad is not None for each in adapted.parameters() if each.requires_grad)
