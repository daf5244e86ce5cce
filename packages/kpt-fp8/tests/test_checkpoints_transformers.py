"""Checkpoints that are written here, read by the libraries whose formats they have; and the other way round."""

import pytest

from checkpoint_files import quantized, tensors_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM

from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint
from kpt_fp8.transformers import load
from transformers_models import logits, model, sqnr

#: What transformers reads on a CPU: all seven variants of a dense model; of a MoE model, what it has converters for.
READ = [
    ("llama", "fp8-block"),
    ("llama", "fp8-tensor-static"),
    ("llama", "ct-channel"),
    ("llama", "ct-channel-bf16"),
    ("llama", "ct-tensor-static"),
    ("llama", "ct-block"),
    ("llama", "ct-weight-only"),
    ("llama", "torchao"),
    ("mixtral", "fp8-block"),
    ("mixtral", "ct-channel"),
    ("qwen3_moe", "fp8-tensor-static"),
    ("qwen3_moe", "ct-weight-only"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for kind in {kind for kind, _ in READ}:
        folder = tmp_path_factory.mktemp("models") / kind
        model(kind).save_pretrained(folder)
        made[kind] = folder
    return made


# transformers and torchao warn of themselves.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "variant"), READ)
def test_transformers_reads_what_is_written_here(kind, variant, models, tmp_path):
    if variant.startswith("ct"):
        pytest.importorskip("compressed_tensors")
    options = {}
    if variant == "torchao":
        pytest.importorskip("torchao")
        options["activations"] = "none"  # it multiplies 8-bit numbers on GPUs alone
    quantized(tmp_path / "out", models[kind], variant, **options)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    own = logits(load(tmp_path / "out", quantize_activations=False))
    # compressed-tensors quantises activations on a CPU too, and transformers computes in bfloat16 after fp8.
    assert sqnr(own, logits(theirs)) > (20 if variant.startswith("ct") and "only" not in variant else 30)
    assert sqnr(logits(AutoModelForCausalLM.from_pretrained(models[kind])), own) > 15


def test_what_transformers_wrote_is_loaded_and_stays_8_bit(models, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    # transformers quantises on GPUs alone; its own operation makes the tensors that it would write there.
    class Quantizer:
        quantization_config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])

    original = AutoModelForCausalLM.from_pretrained(models["llama"])
    operation = Fp8Quantize(Quantizer())
    state = {}
    for name, tensor in original.state_dict().items():
        left = "embed" in name or "norm" in name or "lm_head" in name
        state |= {name: tensor} if left else operation.convert({name: [tensor]})
    original.config.quantization_config = Quantizer.quantization_config.to_dict()
    original.save_pretrained(tmp_path / "out", state_dict=state)
    assert check_checkpoint(tmp_path / "out") == []
    loaded, info = load(tmp_path / "out", quantize_activations=False, output_loading_info=True)
    assert not any(info.values())
    assert sqnr(logits(AutoModelForCausalLM.from_pretrained(models["llama"])), logits(loaded)) > 20
    held = sum(each.nbytes for each in loaded.parameters())
    assert held == sum(each.nbytes for each in tensors_of(tmp_path / "out").values())
    assert convert_checkpoint(tmp_path / "out", tmp_path / "again", to="compressed-tensors").exact
