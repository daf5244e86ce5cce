"""FP8 checkpoints without their quantisation: the same numbers, for every reader."""

import json

import pytest
import torch

from checkpoint_files import VARIANTS, quantized, tensors_of
from kpt_core import InputError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kpt_fp8.checkpoints import convert_checkpoint
from transformers_models import logits, numbers, saved, with_numbers

PAIRS = [*(("llama", variant) for variant in VARIANTS), ("mixtral", "fp8-block"), ("qwen3_moe", "ct-channel")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved(tmp_path_factory)


@pytest.mark.parametrize("to", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "variant"), PAIRS)
def test_plain_transformers_computes_with_the_same_numbers(kind, variant, to, models, tmp_path):
    quantized(tmp_path / "fp8", models[f"{kind} on disk"], variant)
    report = convert_checkpoint(tmp_path / "fp8", tmp_path / "plain", to=to, max_shard_bytes=100_000)
    dtype, wanted = getattr(torch, to), numbers(tmp_path / "fp8")
    stored = tensors_of(tmp_path / "plain")
    assert not any(each.dtype.itemsize == 1 for each in stored.values())
    for name, exact in wanted.items():
        assert torch.equal(stored[name], exact.to(dtype))
    told = {each.name: each.exact for each in report.tensors}
    assert told == {name: torch.equal(exact.to(dtype).float(), exact) for name, exact in wanted.items()}
    assert report.scheme is None
    assert report.bytes == sum(each.nbytes for each in stored.values())
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    rounded = {name: each.to(dtype).float() for name, each in wanted.items()}
    torch.testing.assert_close(logits(loaded), logits(with_numbers(models[kind], rounded)), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert {config.get("dtype", to), config.get("torch_dtype", to)} == {to}


def test_it_is_quantised_again_to_the_same_codes(models, tmp_path):
    quantized(tmp_path / "fp8", models["llama on disk"], "ct-channel")
    convert_checkpoint(tmp_path / "fp8", tmp_path / "plain", to="float32")
    convert_checkpoint(tmp_path / "plain", tmp_path / "again", to="compressed-tensors", granularity="row")
    before, after = numbers(tmp_path / "fp8"), numbers(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, exact in before.items():
        torch.testing.assert_close(after[name], exact, rtol=1e-6, atol=0)


def test_scales_of_caches_are_left_out_and_told(models, tmp_path):
    quantized(tmp_path / "fp8", models["llama on disk"], "fp8-block")
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    file = tmp_path / "fp8" / "model.safetensors"
    save_file(tensors_of(tmp_path / "fp8") | scales, file, {"format": "pt"})
    report = convert_checkpoint(tmp_path / "fp8", tmp_path / "plain", to="bfloat16")
    assert "model.layers.0.self_attn.k_scale" in report.notes[0]
    assert not scales.keys() & tensors_of(tmp_path / "plain").keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "bfloat16", "granularity": "row"}, "without quantisation: leave out what says how"),
        ({"to": "float16"}, "which float16 has not: take bfloat16"),
    ],
)
def test_what_can_not_be_is_a_sentence_and_nothing_is_written(options, said, models, tmp_path):
    quantized(tmp_path / "fp8", models["llama on disk"], "ct-channel")
    tensors = tensors_of(tmp_path / "fp8")
    scale = next(each for name, each in tensors.items() if name.endswith("weight_scale"))
    scale[0], scale[1] = scale[0] * 1e6, scale[1] / 1e6  # which no reciprocals would be
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=said):
        convert_checkpoint(tmp_path / "fp8", tmp_path / "plain", **options)
    assert not (tmp_path / "plain").exists()


def test_what_is_plain_already_is_a_sentence(models, tmp_path):
    with pytest.raises(InputError, match="is not quantised, so there is nothing to make bfloat16 of"):
        convert_checkpoint(models["llama on disk"], tmp_path / "plain", to="bfloat16")
