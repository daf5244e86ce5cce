"""`kpt plan`: devices that are not here, with the figures of closed formulas."""

import json
from typing import ClassVar

import pytest
import torch

from kpt_cli import plan as planning
from kpt_core.errors import UnknownNameError
from kpt_optimize.devices import AcceleratorBackend, Peaks

QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


class Acme(AcceleratorBackend):
    name, device_types, chips = "acme", ("xpu",), ("a1", "a2")
    products: ClassVar = {"Acme One": Peaks("a1", 80, 100.0, 1000.0, "a leaflet")}

    def why_no_device(self):
        return "none is here"

    def properties_of(self, product, chip):
        return product

    def describe(self, properties):
        return {"capabilities": frozenset(), "unsupported": None, "peaks": self.products.get(properties)}


@pytest.fixture
def plan(kpt, monkeypatch):
    monkeypatch.setattr("kpt_core.registry._added", {"acme": Acme()})

    def run(*arguments):
        result = kpt("plan", *arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("qwen")
    Qwen3MoeConfig(**QWEN3_30B).save_pretrained(folder)
    return folder


def test_qwen3_30b_has_its_parameters_and_the_cache_of_the_formula(plan, qwen):
    found = plan(qwen, "--target", "a1", "--dtype", "bfloat16", "--tokens", 4096, "--batch", 2)
    assert found["parameters"] == pytest.approx(30.5e9, rel=0.002)
    assert found["memory"]["weights"]["bfloat16"] == 2 * found["parameters"]
    assert found["memory"]["kv_cache"] == 2 * 48 * 4 * 128 * (2 * 4096) * 2
    # 3.35 billion parameters work on a token, of which the embedding only looks up; attention comes on top.
    active = found["parameters"] - 48 * 120 * 3 * 2048 * 768 - 2 * 151936 * 2048
    attention = 48 * 2 * 4096 * 4096 * 128 * 32 * 2  # half of both products, of two sequences
    prefill, decode = found["roofline"]
    assert prefill["flops"] == pytest.approx(2 * active * 8192 + attention, rel=0.002)
    # Two tokens, each with 8 of 128 experts: some are the same.
    read = active + 151936 * 2048 + 48 * 128 * 3 * 2048 * 768 * ((1 - (120 / 128) ** 2) - 8 / 128)
    assert decode["nbytes"] == pytest.approx(2 * read + found["memory"]["kv_cache"], rel=0.002)
    assert (prefill["bound_by"], decode["bound_by"]) == ("arithmetic", "memory")
    assert decode["seconds"] == pytest.approx(decode["nbytes"] / 1e12)
    assert found["fits"]
    assert [row["calls"] for row in found["kernels"] if row["op"] == "moe.experts"] == [48] * 2
    assert [part["name"] for part in prefill["parts"]] == ["attention", "experts", "linear layers"]
    assert sum(part["nbytes"] for part in decode["parts"]) == pytest.approx(decode["nbytes"], rel=0.01)


#: What the parts of an FP8 checkpoint's layers run on; docs/hardware/kernels.md says the same of such calls.
SDPA, TRITON = "kpt_attention.torch_kernels.gpu_sdpa:forward", "kpt_triton.{}:forward"
PLAIN = {
    "attention.dense": {SDPA},
    "attention.paged": {TRITON.format("attention.paged")},
    "attention.update_cache": {TRITON.format("attention.update_cache")},
    "moe.experts": {TRITON.format("moe.experts")},
    "linear": {"torch.nn.functional.linear"},
}
QUANTISED = PLAIN | {
    "fp8.linear": {"kpt_fp8.torch_kernels.gpu_linear:forward"},
    "fp8.quantize": {TRITON.format("fp8.quantize")},
    "fp8.scaled_mm": {"kpt_fp8.torch_kernels.gpu_scaled_mm_blocks:forward"},
}
FNUZ = QUANTISED | {
    "fp8.scaled_mm": {TRITON.format("fp8.scaled_mm")},
}


@pytest.mark.parametrize(
    ("target", "fp8", "bandwidth", "rate", "rate_of_linear", "kernels", "fits"),
    [
        ("H100", False, 3350e9, 989e12, 989e12, PLAIN, [True, False]),
        ("H100", True, 3350e9, 989e12, 1979e12, QUANTISED, [True, True]),
        ("MI300X", False, 5300e9, 1307.4e12, 1307.4e12, PLAIN, [True, True]),
        ("MI300X", True, 5300e9, 1307.4e12, 2614.9e12, FNUZ, [True, True]),
    ],
)
def test_a_checkpoint_has_the_kernels_and_rates_of_the_chip(
    plan, qwen, tmp_path, monkeypatch, target, fp8, bandwidth, rate, rate_of_linear, kernels, fits
):
    pytest.importorskip("kpt_triton", reason="its kernels are named")
    backends = {
        name: pytest.importorskip(f"kpt_backend_{name}", reason="its kernels are named").BACKEND
        for name in ("nvidia", "amd")
    }
    monkeypatch.setattr("kpt_core.registry._added", backends)
    config = json.loads((qwen / "config.json").read_text()) | {"dtype": "bfloat16", "tie_word_embeddings": False}
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(tmp_path, "--target", target, "--tokens", 4096)
    chosen = {}
    for row in found["kernels"]:
        chosen.setdefault(row["op"], set()).add(row["kernel"])
    assert chosen == kernels

    layers, tokens, width = 48, 4096, 1 + 4 / 128**2 if fp8 else 2
    linear = layers * (2 * 2048 * 4096 + 2 * 2048 * 512)
    experts, router, head = layers * 3 * 2048 * 768, layers * 2048 * 128, 2048 * 151936
    cache = layers * 2 * 4 * 128 * tokens * 2
    of_experts, mixed = 2 * tokens * 8 * experts, 2 * tokens * router + layers * 2 * tokens * tokens * 128 * 32
    # MI300X multiplies e4m3fnuz alone, in which no checkpoint's experts are.
    rate_of_experts = rate_of_linear if target == "H100" else rate
    prefill = mixed / rate + of_experts / rate_of_experts + 2 * tokens * linear / rate_of_linear
    rows = {(row["step"], row["batch"]): row for row in found["throughput"]}
    assert set(rows) == {(step, batch) for step in ("prefill", "decode") for batch in (1, 64)}
    for batch, room in zip((1, 64), fits, strict=True):
        used = 128 * (1 - (1 - 8 / 128) ** batch)
        read = width * (linear + used * experts) + 2 * (router + head) + batch * cache
        step = rows["decode", batch]
        assert step["nbytes"] == pytest.approx(read, rel=0.005)
        assert step["tokens_per_second"] == pytest.approx(batch * bandwidth / read, rel=0.005)
        assert (step["bound_by"], step["fits"]) == ("memory", room)
        assert rows["prefill", batch]["tokens_per_second"] == pytest.approx(tokens / prefill, rel=0.005)
        longest = "float8_e4m3fn" if fp8 and target == "H100" else "bfloat16"
        assert (rows["prefill", batch]["bound_by"], rows["prefill", batch]["units"]) == ("arithmetic", longest)


def test_experts_are_rounded_above_the_rows_that_their_kernel_says():
    kernels = pytest.importorskip("kpt_triton.moe.experts", reason="it is the kernel")
    assert kernels.MOST_ROWS_EXACT == planning.MOST_ROWS_EXACT


def test_experts_of_8_bits_are_asked_for_as_such(plan, qwen, monkeypatch):
    """A TPU's kernel of experts takes none, whatever it takes of bfloat16."""
    tpu = pytest.importorskip("kpt_backend_tpu", reason="its kernels are named").BACKEND
    monkeypatch.setattr("kpt_core.registry._added", {"tpu": tpu})
    asked = (qwen, "--target", "v5e", "--dtype", "bfloat16", "--tokens", 64)
    for words, served in (((), True), (("--weights", "fp8"), False)):
        rows = [row for row in plan(*asked, *words)["kernels"] if row["op"] == "moe.experts"]
        assert {row["backend"] == "tpu" for row in rows} == {served}
        assert all(any("weights of 8 bits" in why for why in row["refused"]) != served for row in rows)


def test_memory_is_that_of_a_real_model(plan, mixtral):
    from transformers import AutoModelForCausalLM

    found = plan(mixtral / "config.json", "--target", "a1", "--tokens", 16, "--batch", 3, "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(mixtral)
    cache = model(torch.ones(3, 16, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sum(found["memory"]["weights"].values()) == held
    assert found["memory"]["kv_cache"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert found["roofline"][0]["tflops"] is None


def test_training_has_gradients_and_two_moments(plan, mixtral):
    found = plan(mixtral, "--target", "a1", "--tokens", 16, "--train", "--dtype", "bfloat16")
    weights = found["memory"]["weights"]["bfloat16"]
    assert found["memory"]["gradients"] == weights
    assert found["memory"]["optimizer_state"] == pytest.approx(2 * weights, rel=0.01)
    assert found["memory"]["activations"] > 0
    assert found["memory"]["kv_cache"] == 0
    assert [row["name"] for row in found["roofline"]] == ["training, 1 x 16 tokens"]


def test_what_does_not_fit_is_told_with_what_would(kpt, plan, mixtral):
    options = [mixtral, "--target", "a1", "--dtype", "float32", "--tokens", 64]
    found = plan(*options, "--memory", "64K")
    peak = found["memory"]["peak"]
    assert not found["fits"]
    assert found["missing_bytes"] == peak - 64 * 1024
    lean = plan(*options, "--memory", "64K", "--weights", "fp8")["memory"]
    assert found["remedies"][0].startswith("8-bit weights (--weights fp8)")
    assert set(lean["weights"]) == {"float8_e4m3fn", "float32"}
    assert lean["peak"] < peak - 0.5 * found["memory"]["weights"]["float32"]
    assert found["remedies"][-1].startswith(f"{-(-peak // 65536)} such devices")
    nearly = plan(*options, "--memory", f"{(peak - found['memory']['kv_cache']) / 1024}K")["remedies"]
    assert any("a context of about" in remedy for remedy in nearly)
    said = kpt("plan", *options, "--memory", "64K").stdout
    assert "It does not fit into 64.00 KiB" in said
    assert "Times are lower bounds" in said


def test_the_memory_of_a_chip_without_a_known_product_must_be_given(kpt, plan, mixtral):
    assert plan(mixtral, "--target", "a2", "--memory", "1GB")["target"]["memory_bytes"] == 10**9
    assert "give its --memory" in kpt("plan", mixtral, "--target", "a2").stderr


def test_a_chip_is_planned_for_without_its_vendors_backend(kpt, plan, mixtral):
    found = plan(mixtral, "--target", "MI300X", "--dtype", "bfloat16")
    assert found["target"]["product"] == "AMD Instinct MI300X"
    assert found["target"]["missing_package"] == "kpt-backend-amd"
    assert found["target"]["memory_bytes"] == 192 * 2**30
    assert all(step["seconds"] > 0 for step in found["roofline"])
    assert {row["kernel"] for row in found["kernels"] if row["op"] != "linear"} == {None}
    said = kpt("plan", mixtral, "--target", "MI300X").stdout
    assert "install ./packages/kpt-backend-amd to see which kernels would run" in said.replace("\n", " ")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    from transformers import BertConfig

    folder = tmp_path_factory.mktemp("bert")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
    config.save_pretrained(folder)
    return folder


LLAMA_LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def parts_of(step):
    return {part["name"]: part for part in step["parts"]}


@pytest.mark.parametrize(
    ("options", "width"), [(["--dtype", "bfloat16"], 2), (["--dtype", "float32"], 4)], ids=["bfloat16", "float32"]
)
def test_llama_has_the_products_and_bytes_of_the_formula(plan, llama_8b, options, width):
    found = plan(llama_8b, "--target", "a1", "--batch", 2, "--tokens", 1024, *options)
    head = 4096 * 128256
    for step, rows, last in zip(found["roofline"], (2048, 2), (2, 2), strict=True):
        linear = parts_of(step)["linear layers"]
        assert linear["flops"] == 2 * (rows * LLAMA_LAYERS + last * head)
        assert linear["nbytes"] == width * (LLAMA_LAYERS + head)
    prefill, decode = map(parts_of, found["roofline"])
    assert prefill["attention"]["flops"] == 32 * 2 * 2 * 1024 * 1024 * 128 * 32  # half of two products, two sequences
    assert decode["attention"]["flops"] == 32 * 4 * 2 * 1025 * 128 * 32
    assert decode["attention"]["nbytes"] == 32 * 2 * 2 * 1025 * 8 * 128 * width
    for step in found["roofline"]:
        compute = 0 if width == 4 else step["flops"] / 100e12  # no rate of float32
        assert step["seconds"] == pytest.approx(max(compute, step["nbytes"] / 1e12))
        assert step["nbytes"] == pytest.approx(sum(part["nbytes"] for part in step["parts"]), rel=0.01)
    calls = {(row["op"], *row["sizes"]): (row["calls"], row["note"]) for row in found["kernels"]}
    assert calls["attention.dense", 2, 32, 1024, 128] == (32, "causal, 1024 keys of 8 heads")
    assert calls["linear", 2048, 4096, 1024] == (64, "")


def test_attention_beside_8_bit_layers_has_the_rate_of_the_activations(plan, llama_8b):
    options = [llama_8b, "--target", "NVIDIA H100 80GB HBM3", "--tokens", 512, "--dtype", "bfloat16"]
    pairs = zip(plan(*options, "--weights", "fp8")["roofline"], plan(*options)["roofline"], strict=True)
    for found, plain in (map(parts_of, pair) for pair in pairs):
        assert found["attention"] == plain["attention"]
        rates = [part["tflops"] for part in (found["attention"], found["linear layers"], plain["linear layers"])]
        assert rates == [989, 1979, 989]


def test_8_bit_layers_are_planned_with_their_kernels(kpt, plan, llama_8b):
    options = [llama_8b, "--target", "a1", "--tokens", 512, "--dtype", "bfloat16", "--weights", "fp8"]
    found = plan(*options)
    linear = parts_of(found["roofline"][1])["linear layers"]
    # A scale of four bytes for 128 x 128 codes; the output's matrix stays.
    assert linear["nbytes"] == LLAMA_LAYERS * (1 + 4 / 128**2) + 2 * 4096 * 128256
    cache = {"attention.paged", "attention.update_cache"}
    assert {row["op"] for row in found["kernels"]} == {"attention.dense", "fp8.linear", "linear", *cache}
    kernels = {row["kernel"] for row in found["kernels"] if row["op"] == "fp8.linear"}
    assert kernels == {"kpt_fp8.torch_kernels.gpu_linear:forward"}
    said = kpt("plan", *options).stdout
    assert "fp8.linear" in said
    assert "linear layers" in said


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_sees_all_keys_and_takes_one_step(plan, bert, training):
    found = plan(bert, "--target", "a1", "--batch", 3, "--tokens", 128, *(["--train"] if training else []))
    (step,) = found["roofline"]
    assert step["name"].startswith("training" if training else "forward")
    assert parts_of(step)["attention"]["flops"] == (3 if training else 1) * 12 * 4 * 3 * 128 * 128 * 64 * 12
    assert [row["note"] for row in found["kernels"] if row["op"] == "attention.dense"] == ["128 keys of 12 heads"]
    assert sum(part["flops"] for part in step["parts"]) == step["flops"]


def test_the_time_on_a_processor_is_unknown_and_to_be_measured(kpt, plan, llama):
    found = plan(llama, "--target", "cpu", "--tokens", 8)
    assert {row["kernel"] for row in found["kernels"] if row["op"] == "attention.dense"} == {
        "kpt_attention.torch_kernels.sdpa:forward"
    }
    assert {step["seconds"] for step in found["roofline"]} == {None}
    said = " ".join(kpt("plan", llama, "--target", "cpu", "--tokens", 8).stdout.split())
    assert "It fits" in said
    assert "No rates of this machine's processor are known, so the time is not either: measure" in said


def test_ops_of_a_package_that_is_missing_are_told(kpt, plan, llama, monkeypatch):
    def get_op(name):
        raise UnknownNameError("op", name, ())

    monkeypatch.setattr("kpt_optimize.forecast.get_op", get_op)
    options = [llama, "--target", "a1", "--tokens", 8, "--weights", "fp8", "--dtype", "bfloat16"]
    missing = {row["op"]: row["missing_package"] for row in plan(*options)["kernels"]}
    assert missing == {"attention.dense": "kpt-attention", "fp8.linear": "kpt-fp8", "linear": None}
    said = " ".join(kpt("plan", *options).stdout.split())
    assert "Kernels are unknown: install ./packages/kpt-fp8 to see which kernels would run." in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "gfx9"], "unknown target 'gfx9': did you mean 'gfx"),
        (["--target", "cpu", "--memory", "lots"], "--memory 'lots': expected an amount with its unit"),
        (["--target", "cpu", "--memory", "0GiB"], "--memory '0GiB'"),
        (["--target", "cpu", "--tokens", "129"], "reads at most 128 tokens at a time"),
        (["--target", "cpu", "--train", "--weights", "fp8"], "8-bit weights are for inference"),
        (["--target", "cpu", "--weights", "int8"], "unknown weights 'int8'"),
    ],
)
def test_bad_input_is_one_sentence(kpt, mixtral, arguments, said):
    result = kpt("plan", mixtral, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("kpt: error: ")
    assert said in result.stderr


def test_what_is_no_model_is_refused(kpt, tmp_path):
    assert "does not exist" in kpt("plan", tmp_path / "nix", "--target", "cpu").stderr
    assert "has no config.json" in kpt("plan", tmp_path, "--target", "cpu").stderr
    (tmp_path / "some.json").write_text("[]")
    assert "expected a JSON object" in kpt("plan", tmp_path / "some.json", "--target", "cpu").stderr
