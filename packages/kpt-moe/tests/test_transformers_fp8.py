"""FP8 checkpoints of the hub's format with `experts_implementation="kpt"`, from a file to text, on a CPU."""

import copy
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel, Qwen3MoeConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from kpt_core import InputError, record
from kpt_fp8 import quantize_to_fp8
from kpt_fp8.transformers import load as load_fp8
from kpt_moe.rewrites import Bfloat16Experts
from kpt_moe.transformers import NAME, kpt_fp8_experts_forward
from kpt_moe.transformers import experts as of_transformers

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
    pytest.skip("this transformers has no registry of FP8 experts", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quiet")

PROMPT = torch.tensor([[5, 11, 7, 30, 8]])
E4M3 = torch.float8_e4m3fn
_TINY: dict[str, Any] = {
    "vocab_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 136,
    "q_lora_rank": 72,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 40,
}


def qwen3(hidden: int, inner: int) -> Qwen3MoeConfig:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "head_dim": 32, "num_key_value_heads": 2}
    return Qwen3MoeConfig(**_TINY, **sizes, num_experts=6)


def deepseek(hidden: int, inner: int) -> DeepseekV3Config:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner + 64}
    routing = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3Config(**_TINY, **_LATENT, **sizes, **routing)


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: qwen3(256, 128),
    "qwen3, blocks cut off": lambda: qwen3(192, 96),
    "qwen3, more blocks than transformers counts": lambda: qwen3(160, 192),
    "deepseek": lambda: deepseek(256, 128),
    "deepseek, blocks cut off": lambda: deepseek(192, 96),
}


@dataclass(frozen=True)
class Checkpoint:
    """Two checkpoints of one model.

    Attributes:
        path: with 8-bit matrices, as the hub has them.
        wide: the float32 numbers that those stand for.
    """

    path: Path
    wide: Path


def per_block(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks, and what they stand for."""
    made = quantize_to_fp8(weight, granularity="128x128")
    codes, scale = made.codes, made.scale
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return codes, scale, codes.float() * spread


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(E4M3)
    return codes, scale, codes.float() * scale


def write(folder: Path, config: Any, quantise: Callable = per_block, **quantization: Any) -> Checkpoint:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            )
    paths = Checkpoint(folder / "fp8", folder / "wide")
    for path in (paths.path, paths.wide):
        model.save_pretrained(path)
    narrow, wide = load_file(paths.path / "model.safetensors"), load_file(paths.wide / "model.safetensors")
    matrices = [name for name in wide if re.search(r"_proj(_with_mqa)?\.weight$|_[ab]_proj\.weight$", name)]
    assert any(".mlp.experts.0.gate_proj" in name for name in matrices)
    for name in matrices:
        narrow[name], scale, wide[name] = quantise(wide[name])
        # One scale for a matrix is a number, and of an expert what transformers stacks to what it expects.
        narrow[f"{name}_scale_inv"] = scale.reshape(1, 1) if scale.dim() == 0 and ".experts." in name else scale
    save_file(narrow, paths.path / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, paths.wide / "model.safetensors", metadata={"format": "pt"})
    read = json.loads((paths.path / "config.json").read_text(encoding="utf-8"))
    usual = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    read["quantization_config"] = {**usual, **quantization}
    (paths.path / "config.json").write_text(json.dumps(read), encoding="utf-8")
    return paths


def load(path: Path, implementation: str = NAME, **choices: Any) -> PreTrainedModel:
    """The checkpoint in 8 bits by kpt-fp8, or the wide one by transformers."""
    choices = {"dtype": torch.float32, "experts_implementation": implementation, **choices}
    narrow = "quantization_config" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    model: PreTrainedModel = (load_fp8 if narrow else AutoModelForCausalLM.from_pretrained)(path, **choices)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PROMPT).logits
    return out


def dtypes(model: PreTrainedModel) -> dict[torch.dtype, int]:
    """Bytes of parameters of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    return sizes


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return write(tmp_path, CONFIGS[request.param]())


@pytest.fixture
def small(tmp_path: Path) -> Checkpoint:
    return write(tmp_path, CONFIGS["deepseek"]())


def test_logits_and_text_are_those_of_the_dequantised_model(checkpoint):
    model, wide = load(checkpoint.path), load(checkpoint.wide, "eager")
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("experts.down_proj")} == {E4M3}
    with record() as log:
        have = logits(model)
    assert {selection.op for selection in log} <= {"moe.experts", "moe.scaled_grouped_mm", "fp8.linear"}
    want = logits(wide)
    assert (have - want).abs().max() < 1e-5 * want.abs().max()
    choices = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(PROMPT, **choices), wide.generate(PROMPT, **choices))


def test_in_bfloat16(small):
    want = logits(load(small.wide, "eager", dtype=torch.float64))
    theirs = logits(load(small.wide, "eager", dtype=torch.bfloat16))
    have = logits(load(small.path, dtype=torch.bfloat16))
    assert have.dtype is torch.bfloat16
    assert (have.double() - want).norm() < 2 * (theirs.double() - want).norm()


def powers_of_two(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, _ = per_block(weight)
    scale = scale.log2().ceil().exp2()
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(E4M3)
    return codes, scale.to(torch.float8_e8m0fnu), codes.float() * spread


def coarse_scales(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, _ = per_block(weight)
    scale = scale.bfloat16()
    spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return codes, scale, codes.float() * spread


#: As checkpoints name what is not quantised: from the start of a name to the end of one of its parts.
EXPERTS_ALONE = ["model.layers.*.self_attn", "model.layers.*.mlp.shared_experts", "model.layers.0.mlp", "lm_head"]
FORMATS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "powers of two": (powers_of_two, {"scale_fmt": "ue8m0"}),
    "scales of bfloat16": (coarse_scales, {}),
    "a scale for each matrix": (per_tensor, {"weight_block_size": None}),
    "experts alone": (per_block, {"modules_to_not_convert": EXPERTS_ALONE}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, tmp_path):
    quantise, quantization = FORMATS[name]
    checkpoint = write(tmp_path, CONFIGS["deepseek"](), quantise, **quantization)
    if "modules_to_not_convert" in quantization:
        narrow, wide = (load_file(path / "model.safetensors") for path in (checkpoint.path, checkpoint.wide))
        of_experts = {key: value for key, value in narrow.items() if ".mlp.experts." in key}
        save_file({**wide, **of_experts}, checkpoint.path / "model.safetensors", metadata={"format": "pt"})
    model = load(checkpoint.path)
    assert {p.dtype for n, p in model.named_parameters() if ".experts." in n and n.endswith("_proj")} == {E4M3}
    want = logits(load(checkpoint.wide, "eager"))
    assert (logits(model) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("implementation", ["eager", NAME])
def test_transformers_own_loader_is_as_it_was(implementation, tmp_path):
    """It dequantises on a CPU; experts are then served as any."""
    owners = {kind.__module__.partition(".")[0] for kind in AUTO_QUANTIZER_MAPPING.values()}
    assert owners <= {"transformers", "kpt_fp8"}
    assert AUTO_QUANTIZER_MAPPING["fp8"].__module__.startswith("transformers.")
    checkpoint = write(tmp_path, CONFIGS["qwen3"]())
    choices = {"experts_implementation": implementation, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, **choices)
    assert E4M3 not in dtypes(model)
    want = logits(load(checkpoint.wide, "eager"))
    assert (logits(model) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_on_a_cpu_beside_a_gpu(small, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    model = load(small.path)
    assert E4M3 in dtypes(model)
    monkeypatch.undo()
    want = logits(load(small.wide, "eager"))
    assert (logits(model) - want).abs().max() < 1e-5 * want.abs().max()


_WITHOUT = """
import transformers.integrations.finegrained_fp8 as fp8

del fp8.FP8ExpertsInterface
import kpt_moe.transformers
assert "kpt" not in fp8.ALL_FP8_EXPERTS_FUNCTIONS
"""


def test_registered_where_transformers_has_a_registry_of_fp8_experts_and_not_otherwise():
    assert fp8.ALL_FP8_EXPERTS_FUNCTIONS[NAME] is kpt_fp8_experts_forward
    subprocess.run([sys.executable, "-c", _WITHOUT], check=True, timeout=300)


def test_set_back_to_eager_gives_the_same(small):
    model = load(small.path)
    want = logits(model)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ({}, "1x128"),
        ({"activations": "row"}, "row"),
        ({"activations": "tensor"}, "none"),
        ({"activations": "none"}, "none"),
        ({"activations": "1x128", "input_bound": 4.0}, "none"),
        ({"activation_scheme": "static"}, "none"),
        ({"gate_up_proj_activation_scale": torch.ones(4, 2)}, "none"),
    ],
    ids=str,
)
def test_kernels_may_round_what_the_checkpoint_rounds(held, named, small, monkeypatch):
    model = load(small.path)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj_scale_inv"))
    del experts.activations
    for name, value in ({"activation_scheme": "dynamic"} | held).items():
        setattr(experts, name, value)
    asked = []
    real = of_transformers.experts
    monkeypatch.setattr(
        of_transformers, "experts", lambda *a, **more: asked.append(more["activations"]) or real(*a, **more)
    )
    logits(model)
    assert asked[0] == named


def test_copies_and_files_of_torch(small):
    model = load(small.path)
    have = logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for same in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(same), have)


def test_gradients_reach_what_is_not_quantised(small):
    """An adapter's, or the embedding's."""
    have, want = load(small.path), load(small.wide, "eager")
    for model in (have, want):
        model(PROMPT, labels=PROMPT).loss.backward()
    a, b = have.get_input_embeddings().weight.grad, want.get_input_embeddings().weight.grad
    assert (a - b).norm() < 1e-4 * b.norm()
    assert all(p.grad is None for p in have.parameters() if p.dtype is E4M3)


def test_another_dtype_is_of_what_is_computed_and_codes_stay(tmp_path):
    path = write(tmp_path, CONFIGS["qwen3"]()).path
    model = load(path).to("cpu", torch.bfloat16)  # what a user types
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("experts.down_proj")} == {E4M3}
    have, want = logits(model), logits(load(path, dtype=torch.bfloat16))
    assert (have - want).norm() < 0.03 * want.norm()  # the frequencies of positions became bfloat16 too


def test_codes_that_were_widened_without_their_scales_are_named(small):
    """Transformers' own module lets them be."""
    layer = next(module for module in load(small.path).modules() if hasattr(module, "gate_up_proj"))
    layer.gate_up_proj = torch.nn.Parameter(layer.gate_up_proj.detach().float())
    with pytest.raises(
        InputError, match=r"gate_up_proj holds 8-bit codes .*made torch.float32.*from_pretrained the dtype"
    ):
        layer(torch.randn(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_8_bit_experts_are_not_converted_to_bfloat16(small):
    assert list(Bfloat16Experts().sites(load(small.path))) == []


def test_model_compiles_without_a_break(small):
    model = load(small.path)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        have = compiled(PROMPT, use_cache=False).logits
    torch.testing.assert_close(have, logits(model), rtol=1e-5, atol=1e-5)
