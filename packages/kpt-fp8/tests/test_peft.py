import pytest
import torch

from checkpoint_files import quantized
from kpt_core import InputError
from kpt_fp8 import NativeFP8Linear, convert_model_to_fp8

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model

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


def test_a_merged_adapter_is_taken_out_again():
    whole = convert_model_to_fp8(model("llama"))
    before = logits(whole)
    adapted = get_peft_model(whole, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    adapted.merge_adapter()
    assert sqnr(before, logits(adapted)) < 15
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        assert sqnr(before, logits(adapted)) > 20


def test_an_adapter_on_experts_is_refused_instead_of_left_untrained(tmp_path):
    model("qwen3_moe").save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", "fp8-block")
    adapted = get_peft_model(load(tmp_path / "out"), LoraConfig(target_modules="all-linear", r=4))
    with pytest.raises(InputError, match="adapters on 8-bit experts can't be trained"):
        adapted(input_ids=IDS)


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
