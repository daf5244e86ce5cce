import json

import pytest
import torch

import kpt_core
from checkpoint_files import VARIANTS, change, config_of, quantized, tensors_of
from kpt_core import InputError
from kpt_fp8 import FP8Tensor, NativeFP8Linear

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from kpt_fp8 import NativeFP8Experts
from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint, examine_checkpoint
from kpt_fp8.transformers import load
from processes import run
from transformers_models import WRAPPERS, logits, model, numbers, saved, sqnr, with_numbers, wrapper

FP8 = torch.float8_e4m3fn
MOE = (
    ("mixtral", "fp8-block"),
    ("mixtral", "fp8-tensor-static"),
    ("mixtral", "torchao"),
    ("qwen3_moe", "ct-channel"),
    ("qwen3_moe", "ct-block"),
    ("qwen3_moe", "modelopt"),
)
PAIRS = [*(("llama", variant) for variant in VARIANTS), *MOE]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved(tmp_path_factory)


@pytest.mark.parametrize(("kind", "variant"), PAIRS)
def test_a_checkpoint_computes_what_its_numbers_do_and_stays_8_bit(kind, variant, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], variant)
    expected = logits(with_numbers(models[kind], numbers(tmp_path / "out")))
    loaded, info = load(tmp_path / "out", quantize_activations=False, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    held = sum(each.nbytes for each in loaded.parameters())
    stored = tensors_of(tmp_path / "out")
    written = sum(each.nbytes for each in stored.values())
    # Scales of bfloat16 are widened, static scales of activations are not needed; nothing else differs.
    more = sum(each.nbytes for each in stored.values() if each.dtype is torch.bfloat16)
    less = sum(each.nbytes for name, each in stored.items() if name.endswith(("input_scale", "activation_scale")))
    assert written + more - less <= held <= written + more
    parts = (each.codes if isinstance(each, FP8Tensor) else each for each in loaded.parameters())
    codes = sum(each.numel() for each in parts if each.dtype is FP8)
    assert codes == sum(each.numel() for each in numbers(tmp_path / "out").values())
    assert not any(
        each.requires_grad for each in loaded.parameters() if isinstance(each, FP8Tensor) or each.dtype is FP8
    )


@pytest.mark.parametrize(
    ("kind", "variant"),
    [("llama", "ct-channel"), ("llama", "ct-weight-only"), ("mixtral", "fp8-block"), ("qwen3_moe", "fbgemm")],
)
def test_activations_are_quantised_as_the_checkpoint_says(kind, variant, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], variant)
    exact = logits(load(tmp_path / "out", quantize_activations=False))
    loaded = load(tmp_path / "out", quantize_activations=True)
    kinds = {each.activations for each in loaded.modules() if isinstance(each, NativeFP8Linear)}
    wanted = {"fp8-block": "1x128", "ct-weight-only": "none"}.get(variant, "row")
    assert kinds == {wanted}
    if wanted == "none":
        assert torch.equal(logits(loaded), exact)
    else:
        assert 15 < sqnr(exact, logits(loaded)) < 45


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_bound_of_activations_is_kept(kind, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], "fbgemm")
    loaded = load(tmp_path / "out", quantize_activations=True)
    x = torch.full((1, 128), 3.0)
    x[0, 0] = 5000
    layers = [loaded.model.layers[0].self_attn.q_proj]
    if kind == "qwen3_moe":
        experts = loaded.model.layers[0].mlp.experts
        layers = [lambda x: experts._product(x, "down_proj", 0)]
    assert torch.equal(layers[0](x), layers[0](x.clamp(max=1200)))
    assert layers[0](x * torch.inf).isnan().all()
    plain = load(tmp_path / "out", quantize_activations=False).model.layers[0].self_attn.q_proj
    assert not torch.equal(plain(x), plain(x.clamp(max=1200)))


@pytest.mark.parametrize("variant", ["fp8-tensor-static", "ct-tensor-static"])
def test_static_scales_reach_layers_and_experts(variant, models, tmp_path):
    quantized(tmp_path / "out", models["mixtral on disk"], variant)
    loaded, held = load(tmp_path / "out", quantize_activations=True), tensors_of(tmp_path / "out")
    ending = "activation_scale" if variant.startswith("fp8") else "input_scale"
    layer = loaded.model.layers[1].self_attn.k_proj
    assert layer.activations == "tensor"
    assert torch.equal(layer.input_scale, held[f"model.layers.1.self_attn.k_proj.{ending}"].reshape(()))
    experts = loaded.model.layers[1].mlp.experts
    assert isinstance(experts, NativeFP8Experts)
    for projection, (scales, place) in {
        "w1": (experts.gate_up_proj_activation_scale, 0),
        "w3": (experts.gate_up_proj_activation_scale, 1),
        "w2": (experts.down_proj_activation_scale, 0),
    }.items():
        for expert in range(4):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.{projection}.{ending}"
            assert scales[expert, place].item() == held[name].item()
    assert logits(loaded).isfinite().all()


@pytest.mark.parametrize(("kind", "variant"), [("llama", "fp8-block"), ("mixtral", "ct-channel")])
def test_a_tied_output_layer_stays_as_it_is(kind, variant, tmp_path):
    original = model(kind, tie_word_embeddings=True)
    original.save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", variant)
    expected = logits(with_numbers(original, numbers(tmp_path / "out")))
    for left in (["lm_head"], []):  # as others may write it, too
        change(tmp_path / "out", **{"ignore" if variant.startswith("ct") else "modules_to_not_convert": left})
        loaded, info = load(tmp_path / "out", quantize_activations=False, output_loading_info=True)
        assert not any(info.values())
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_models_around_a_text_model_load_by_the_names_of_their_files(kind, tmp_path):
    original = wrapper(kind)
    original.save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", "fp8-block")
    loaded, info = load(tmp_path / "out", quantize_activations=False, output_loading_info=True)
    assert not any(info.values())
    assert not isinstance(loaded.lm_head, NativeFP8Linear)
    layers = [name for name, each in loaded.named_modules() if isinstance(each, NativeFP8Linear)]
    assert len(layers) == len(numbers(tmp_path / "out"))
    assert {"visual" in name or "vision" in name for name in layers} == {True, False}
    assert 15 < sqnr(logits(original), logits(loaded)) < 45


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("variant", ["fp8-tensor-static", "ct-tensor-static", "torchao"])
def test_one_number_may_have_any_shape(kind, variant, shape, models, tmp_path):
    options = {"granularity": "tensor"} if variant == "torchao" else {}
    quantized(tmp_path / "out", models[f"{kind} on disk"], variant, **options)
    expected = logits(load(tmp_path / "out"))
    scales = {name: each for name, each in tensors_of(tmp_path / "out").items() if "scale" in name}
    change(tmp_path / "out", {name: each.reshape(shape) for name, each in scales.items()})
    assert torch.equal(logits(load(tmp_path / "out")), expected)


@pytest.mark.parametrize("variant", ["ct-channel", "fp8-tensor-static", "fp8-block", "ct-weight-only"])
def test_where_fnuz_alone_is_multiplied_codes_become_those_with_the_same_numbers(
    variant, models, tmp_path, monkeypatch
):
    quantized(tmp_path / "out", models["llama on disk"], variant)
    usual = load(tmp_path / "out", quantize_activations=True)
    backend = kpt_core.backends()["torch"]
    found = backend.capabilities(torch.device("cpu")) | {"fp8_e4m3fnuz"}  # as on gfx942
    monkeypatch.setattr(type(backend), "capabilities", lambda self, device: found)
    loaded = load(tmp_path / "out", quantize_activations=True)
    pairs = [
        (each, usual.get_submodule(name)) for name, each in loaded.named_modules() if isinstance(each, NativeFP8Linear)
    ]
    assert pairs
    for one, other in pairs:
        wanted = other.weight.codes.dtype if variant == "ct-weight-only" else torch.float8_e4m3fnuz
        assert one.weight.codes.dtype is wanted
        torch.testing.assert_close(one.weight.dequantize(), other.weight.dequantize(), rtol=0, atol=0)
        assert variant == "ct-weight-only" or one.activation_dtype is torch.float8_e4m3fnuz
    # Static scales give the same codes; computed ones are by 240 for 448, so each quantises in its own way.
    assert sqnr(logits(loaded), logits(usual)) > (60 if variant in ("fp8-tensor-static", "ct-weight-only") else 12)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_scales_of_rows_may_have_one_dimension(kind, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], "ct-channel")
    expected = logits(load(tmp_path / "out"))
    scales = {name: each for name, each in tensors_of(tmp_path / "out").items() if "scale" in name}
    change(tmp_path / "out", {name: each.flatten() for name, each in scales.items()})
    assert check_checkpoint(tmp_path / "out") == []
    assert torch.equal(logits(load(tmp_path / "out")), expected)
    assert convert_checkpoint(tmp_path / "out", tmp_path / "again", to="fbgemm_fp8").exact


@pytest.mark.parametrize(("kind", "static"), [("llama", True), ("llama", False), ("mixtral", True)])
def test_checkpoints_of_autofp8_are_read(kind, static, models, tmp_path):
    folder, chosen = tmp_path / "out", {} if static else {"activations": "row"}
    quantized(folder, models[f"{kind} on disk"], "fp8-tensor-static", **chosen)
    expected = logits(load(folder)), numbers(folder)
    named = {"_scale_inv": "_scale", "activation_scale": "input_scale"}
    held = tensors_of(folder)
    for old, new in named.items():
        held = {name.replace(old, new) if name.endswith(old) else name: each for name, each in held.items()}
    change(folder, held, remove=tensors_of(folder).keys() - held.keys())
    config = config_of(folder)
    for key in ("weight_block_size", "fmt", "modules_to_not_convert"):
        del config["quantization_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    assert examine_checkpoint(folder).format == "AutoFP8"
    assert check_checkpoint(folder) == []
    assert torch.equal(logits(load(folder)), expected[0])
    report = convert_checkpoint(folder, tmp_path / "again", to="compressed-tensors")
    assert (report.source, report.exact, report.scheme.static) == ("AutoFP8", True, static)
    for name, each in numbers(tmp_path / "again").items():
        assert torch.equal(each, expected[1][name])


def test_what_the_files_do_not_fill_is_named(models, tmp_path):
    quantized(tmp_path / "out", models["llama on disk"], "ct-channel")
    with pytest.raises(InputError, match=r"does not fill score\.weight of the model"):
        load(tmp_path / "out", model_class=LlamaForSequenceClassification)
    norm = "model.layers.1.input_layernorm.weight"
    change(tmp_path / "out", remove=[norm])
    with pytest.raises(InputError, match=f"does not fill {norm}"):
        load(tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("damage", ["NaN", "has a scale of 0.0", "looks like the reciprocal"])
def test_what_the_check_finds_is_not_loaded_and_not_converted(kind, damage, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], "fp8-block")
    held = tensors_of(tmp_path / "out")
    name = next(each for each in held if each.endswith(("down_proj.weight", "w2.weight")))
    codes, scale = held[name], held[f"{name}_scale_inv"]
    if damage == "NaN":
        codes.view(torch.uint8)[0, 0] = 0x7F
    scale = {"NaN": scale, "has a scale of 0.0": scale * 0}.get(damage, 1 / scale)
    change(tmp_path / "out", {name: codes, f"{name}_scale_inv": scale})
    assert [damage in each for each in check_checkpoint(tmp_path / "out")] == [True]
    with pytest.raises(InputError, match=damage):
        load(tmp_path / "out")
    with pytest.raises(InputError, match=damage):
        convert_checkpoint(tmp_path / "out", tmp_path / "again", to="compressed-tensors", granularity="128x128")


def test_codes_are_not_loaded_as_numbers(models, tmp_path):
    quantized(tmp_path / "out", models["llama on disk"], "ct-channel")
    codes, scale = torch.ones(64, 128).to(FP8), torch.ones(64, 1)
    change(tmp_path / "out", {"model.embed_tokens.weight": codes, "model.embed_tokens.weight_scale": scale}, ignore=[])
    with pytest.raises(InputError, match=r"has model\.embed_tokens\.weight in 8 bits, and Embedding would take"):
        load(tmp_path / "out")


def test_load_takes_what_from_pretrained_takes(models, tmp_path):
    (tmp_path / "in").mkdir()
    quantized(tmp_path / "in" / "side", models["llama on disk"], "ct-channel")
    wanted = logits(load(tmp_path / "in" / "side"))
    changed = load(tmp_path / "in", subfolder="side", use_cache=False, torch_dtype="float32")
    assert changed.config.use_cache is False
    assert changed.dtype is torch.float32
    assert torch.equal(logits(load(tmp_path / "in" / "side", config=str(tmp_path / "in" / "side"))), wanted)
    config = LlamaConfig.from_pretrained(tmp_path / "in" / "side", use_cache=False)
    before = config.to_dict()
    assert load(tmp_path / "in" / "side", config=config).config.use_cache is False
    assert config.to_dict() == before
    shorter = load(tmp_path / "in" / "side", num_hidden_layers=1)
    assert len(shorter.model.layers) == 1


def test_what_is_no_checkpoint_is_a_sentence(models, tmp_path):
    with pytest.raises(InputError, match="is not quantised: load it with transformers"):
        load(models["llama on disk"])
    with pytest.raises(InputError, match=r"is no folder.*hf download meta-llama/Llama-3\.1-8B --local-dir DIR"):
        load("meta-llama/Llama-3.1-8B")
    quantized(tmp_path / "out", models["llama on disk"], "fp8-block")
    with pytest.raises(InputError, match="leave it out"):
        load(tmp_path / "out", quantization_config={})
    scale = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    change(tmp_path / "out", remove=[scale])
    with pytest.raises(InputError, match=f"has no scale {scale}"):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "activations", "experts"),
    [({}, False, "kpt"), ({"quantize_activations": True}, True, "eager"), ({"device_map": "cpu"}, False, "kpt"),
     ({"experts_implementation": "eager"}, False, "eager")],
)  # fmt: skip
@pytest.mark.parametrize("variant", ["ct-channel", "fp8-block", "fp8-tensor-static"])
def test_what_runs_by_default_multiplies_no_8_bit_numbers_on_a_cpu(
    variant, given, activations, experts, models, tmp_path
):
    quantized(tmp_path / "out", models["mixtral on disk"], variant)
    loaded = load(tmp_path / "out", **given)
    assert loaded.config._experts_implementation == experts
    layer = loaded.model.layers[0]
    assert (layer.self_attn.q_proj.activations != "none") == activations
    assert (layer.mlp.experts.activations != "none") == activations
    if not activations:
        other = load(tmp_path / "out", quantize_activations=False, experts_implementation="eager")
        torch.testing.assert_close(logits(loaded), logits(other), rtol=1e-4, atol=1e-5)


def test_a_class_for_a_part_of_a_model_reads_that_parts_configuration(tmp_path):
    text = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    whole = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**text, **heads}, vision_config=vision | {"num_position_embeddings": 16})
    )
    whole.save_pretrained(tmp_path / "source")
    quantized(tmp_path / "out", tmp_path / "source", "ct-channel")
    part = load(tmp_path / "out", model_class=Qwen3_5ForCausalLM)
    assert type(part).__name__ == "Qwen3_5ForCausalLM"
    assert torch.equal(logits(part), logits(load(tmp_path / "out")))


def test_kpt_is_registered_where_it_is_asked_for(models, tmp_path, monkeypatch):
    quantized(tmp_path / "out", models["mixtral on disk"], "fp8-block")
    assert load(tmp_path / "out", attn_implementation="kpt").config._attn_implementation == "kpt"
    monkeypatch.setattr("kpt_fp8.transformers.loading.find_spec", lambda name: None)
    assert load(tmp_path / "out").config._experts_implementation == "eager"
    with pytest.raises(InputError, match="is of kpt_attention: pip install kpt-attention"):
        load(tmp_path / "out", attn_implementation="kpt")


def test_transformers_keeps_what_it_has(models, tmp_path):
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    assert AUTO_QUANTIZER_MAPPING["fp8"].__module__.startswith("transformers.")
    assert AUTO_QUANTIZER_MAPPING["kpt_fp8"].__module__ == "kpt_fp8.transformers.quantizer"
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["fp8"].__module__.startswith("transformers.")


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("kind", "variant"), PAIRS)
def test_what_is_loaded_is_saved_as_it_was(kind, variant, models, tmp_path):
    quantized(tmp_path / "out", models[f"{kind} on disk"], variant)
    loaded = load(tmp_path / "out", quantize_activations="static" in variant)
    if variant == "torchao":
        with pytest.raises(InputError, match="a checkpoint of torchao is not written again"):
            loaded.save_pretrained(tmp_path / "again")
        return
    loaded.save_pretrained(tmp_path / "again")
    before, after = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "again")
    assert {name: (each.dtype, each.shape) for name, each in before.items()} == {
        name: (each.dtype, each.shape) for name, each in after.items()
    }
    assert all(torch.equal(bits(after[name]), bits(each)) for name, each in before.items())
    assert config_of(tmp_path / "again")["quantization_config"] == config_of(tmp_path / "out")["quantization_config"]


def test_static_scales_that_were_left_out_are_missed_when_it_is_saved(models, tmp_path):
    quantized(tmp_path / "out", models["llama on disk"], "fp8-tensor-static")
    with pytest.raises(InputError, match="load it with quantize_activations=True"):
        load(tmp_path / "out").save_pretrained(tmp_path / "again")


def test_experts_run_by_kpt_moe_where_it_is_installed(models, tmp_path):
    pytest.importorskip("kpt_moe")
    folders = [tmp_path / variant for variant in ("fp8-block", "fp8-tensor-static")]
    for folder in folders:
        quantized(folder, models["qwen3_moe on disk"], folder.name)
    # In one process for both, not in this one, since importing kpt_moe.transformers changes what transformers does.
    found = run(
        """
        import sys, kpt_moe.transformers, kpt_core
        from kpt_fp8.transformers import load
        from transformers_models import logits, sqnr
        for folder in sys.argv[1:]:
            one = load(folder, quantize_activations=False, experts_implementation="eager")
            two = load(folder, quantize_activations=False, experts_implementation="kpt")
            with kpt_core.record() as log:
                found = logits(two)
            assert any(each.op == "moe.experts" for each in log), log
            print(sqnr(logits(one), found))
        """,
        *folders,
    )
    assert [float(each) > 80 for each in found] == [True, True], found
