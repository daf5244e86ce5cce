"""FP8 checkpoints without their quantisation: the same numbers, for every reader."""

import json
import sys

import pytest
import torch

from checkpoint_files import VARIANTS, quantized, tensors_of
from kpt_core import InputError, KptWarning

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint
from kpt_fp8.transformers import load
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
    with pytest.warns(KptWarning, match=r"caches are ignored, as model.layers.0.self_attn.k_scale"):
        load(tmp_path / "fp8")


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


def _gguf(path):
    """Write a Llama of one layer, in Q8_0, and return its numbers by the names of transformers."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    rows = {"token_embd": 64, "output": 64, "blk.0.ffn_gate": 128, "blk.0.ffn_up": 128, "blk.0.ffn_down": 64}
    rows |= {f"blk.0.attn_{name}": 64 for name in ("q", "k", "v", "output")}
    found = {}
    for name, count in rows.items():
        numbers = torch.randn(count, 128 if name.endswith("down") else 64).numpy()
        codes = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        found[name] = torch.from_numpy(gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q8_0))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("named", [True, False])
def test_gguf_is_read_by_transformers_and_written_as_numbers(named, tmp_path):
    (tmp_path / "in").mkdir()
    expected = _gguf(tmp_path / "in" / "tiny-Q8_0.gguf")
    source = tmp_path / "in" / ("tiny-Q8_0.gguf" if named else "")
    report = convert_checkpoint(source, tmp_path / "plain", to="bfloat16")
    stored = tensors_of(tmp_path / "plain")
    assert torch.equal(stored["model.embed_tokens.weight"], expected["token_embd"].bfloat16())
    assert torch.equal(stored["model.layers.0.mlp.down_proj.weight"], expected["blk.0.ffn_down"].bfloat16())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values())
    assert (report.source, len(report.tensors), report.exact) == ("GGUF", 9, False)
    assert report.bytes == sum(each.nbytes for each in stored.values())
    assert report.notes[0] == "GGUF was read by transformers, the whole model in memory."
    assert "can't read its tokenizer" in report.notes[1]  # it has none
    assert (tmp_path / "plain" / "model.safetensors").stat().st_mode & 0o044 == 0o044
    for call in (check_checkpoint, lambda path: convert_checkpoint(path, tmp_path / "fp8", to="fp8")):
        with pytest.raises(InputError, match=r"is GGUF; .* run kpt convert .* --to bfloat16 first"):
            call(source)


def _mxfp4(folder):
    """Write a tiny gpt-oss whose experts are MXFP4."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssForCausalLM(GptOssConfig(**sizes, **heads)).save_pretrained(folder)
    held = tensors_of(folder)
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = held.pop(name).shape
        held[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return held


def test_mxfp4_is_read_by_transformers_and_written_as_numbers(tmp_path):
    held = _mxfp4(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    report = convert_checkpoint(tmp_path / "in", tmp_path / "plain", to="bfloat16")
    assert report.source == "MXFP4"
    name = "model.layers.0.mlp.experts.down_proj"
    codes, scales = held[f"{name}_blocks"], held[f"{name}_scales"]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    numbers = table[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * (scales.float() - 127).exp2()[..., None]
    assert torch.equal(tensors_of(tmp_path / "plain")[name].float(), numbers.flatten(-2).mT)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values())
    assert logits(loaded).isfinite().all()
    assert (tmp_path / "plain" / "tokenizer.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "--to bfloat16 first" in check_checkpoint(tmp_path / "in")[0]


def test_what_transformers_needs_for_gguf_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils.quantization_config", None)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(InputError, match=r"a package is missing .*: pip install '.*' gguf"):
        convert_checkpoint(tmp_path / "tiny.gguf", tmp_path / "plain", to="bfloat16")


@pytest.mark.parametrize(("damage", "said"), [(b"GGUF", "transformers can't read"), (None, "has 2 files of GGUF")])
def test_what_transformers_can_not_read_is_a_sentence_and_nothing_is_written(damage, said, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b")[: 1 if damage else 2]:
        (tmp_path / "in" / f"{name}.gguf").write_bytes(damage or b"")
    with pytest.raises(InputError, match=said):
        convert_checkpoint(tmp_path / "in", tmp_path / "plain", to="bfloat16")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
