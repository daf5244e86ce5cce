import pytest
import torch

from kpt_fp8.checkpoints import convert_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import Qwen3MoeForCausalLM, Trainer, TrainingArguments

from kpt_fp8.transformers import load
from transformers_models import logits, model

# PEFT 0.21 asks transformers 5.23 by an old name, and names patterns that experts alone have.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_activation_checkpointing", "ignore:.*_pattern keys")

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROWS = (torch.arange(32).unsqueeze(1) + torch.arange(12)) % 64  # each token is the one before it, plus one


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Give a checkpoint in 8 bits, and the plain one of the same numbers."""
    made = tmp_path_factory.mktemp("models")
    model("qwen3_moe").save_pretrained(made / "source")
    convert_checkpoint(made / "source", made / "fp8", to="fp8")
    convert_checkpoint(made / "fp8", made / "wide", to="float32")
    return made / "fp8", made / "wide"


def trained(adapted, folder):
    """Return the losses of six steps of Trainer."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        seed=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(adapted, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ROWS])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "targets",
    [{"target_modules": ATTENTION, "target_parameters": PARAMETERS}, {"target_modules": "all-linear"}],
    ids=["parameters", "all-linear"],
)
def test_trainer_has_the_losses_of_the_plain_model_and_plain_peft_takes_the_adapter(targets, folders, tmp_path):
    small, wide = folders
    adapted = [
        get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **targets))
        for base in (load(small), Qwen3MoeForCausalLM.from_pretrained(wide))
    ]
    # PEFT rounds the first numbers of an adapter to what it adapts, before they are float32.
    set_peft_model_state_dict(adapted[1], get_peft_model_state_dict(adapted[0]))
    ours, theirs = (trained(each, tmp_path / str(place)) for place, each in enumerate(adapted))
    assert ours[-1] < ours[0] - 0.1
    assert ours == pytest.approx(theirs, rel=1e-3)

    adapted[0].save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(Qwen3MoeForCausalLM.from_pretrained(wide), tmp_path / "adapter")
    expected = logits(adapted[0].eval())
    torch.testing.assert_close(logits(plain.eval()), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(plain.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)
