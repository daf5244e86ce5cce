"""Saved models come back, in transformers that knows nothing of KPT and in KPT."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from round_trip_kinds import MODELS, build, converted, logits, original, other, upcycled
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoModelForCausalLM

from conversion_models import CONVERTED, PROMPT, assert_close
from kpt_core import InputError
from kpt_fp8.checkpoints import convert_checkpoint
from kpt_fp8.transformers import load as load_fp8
from kpt_moe import MoELayer
from kpt_moe.conversion import load_upcycled, to_kpt_layers, to_transformers, upcycle
from kpt_moe.expert_networks import QuantizedFeedForwardExpert

pytestmark = pytest.mark.usefixtures("quiet")

FAMILY = [name for name in MODELS if not name.startswith("upcycled")]

#: What a user without KPT does, with every folder.
PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, logging
logging.set_verbosity_error()
found = {}
for folder in sys.argv[2:]:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except ValueError as error:
        found[folder] = str(error)
        continue
    with torch.no_grad():
        out = model.eval()(torch.tensor(PROMPT)).logits
    found[folder] = out, {what: sorted(map(str, names)) for what, names in report.items() if names}
assert not [name for name in sys.modules if name.startswith("kpt")], "KPT must not be needed"
torch.save(found, sys.argv[1])
""".replace("PROMPT", repr(PROMPT.tolist()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, quiet: None) -> dict[str, Path]:
    """A folder of each model."""
    folders = {}
    for name in MODELS:
        folders[name] = tmp_path_factory.mktemp("saved") / name
        build(name).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def loaded_without_kpt(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `AutoModelForCausalLM.from_pretrained` gives of each folder, in a process of its own."""
    result = tmp_path_factory.mktemp("plain") / "found.pt"
    subprocess.run([sys.executable, "-c", PLAIN, result, *saved.values()], check=True, timeout=120)
    found = torch.load(result)
    return {name: found[str(folder)] for name, folder in saved.items()}


@pytest.mark.parametrize("name", FAMILY)
def test_loads_in_transformers_without_kpt(name, loaded_without_kpt):
    have, report = loaded_without_kpt[name]
    assert report == {}
    assert_close(have, logits(build(name)))


def test_transformers_does_not_take_an_upcycled_model_for_a_dense_one(loaded_without_kpt):
    assert "model type `kpt_upcycled`" in loaded_without_kpt["upcycled llama"]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("served", "converted"))])
def test_files_are_those_of_the_original(name, saved, tmp_path):
    original(MODELS[name][1]).save_pretrained(tmp_path)
    have, want = (load_file(folder / "model.safetensors") for folder in (saved[name], tmp_path))
    assert have.keys() == want.keys()
    assert all(torch.equal(have[key], want[key]) for key in want)
    assert any(".experts.0." in key for key in have), "the hub has each expert's matrices by themselves"


@pytest.mark.parametrize("name", FAMILY)
def test_loads_in_kpt(name, saved):
    model = AutoModelForCausalLM.from_pretrained(saved[name], dtype=torch.float32, experts_implementation="kpt")
    assert_close(logits(model), logits(build(name)))
    assert_close(logits(to_kpt_layers(model, strict=True)), logits(build(name)))


@pytest.mark.parametrize("name", ["converted mixtral", "converted deepseek_v3"])
def test_becomes_an_fp8_checkpoint(name, saved, tmp_path):
    convert_checkpoint(saved[name], tmp_path / "fp8", to="fp8", granularity="tensor")
    convert_checkpoint(tmp_path / "fp8", tmp_path / "wide", to="float32")
    model = load_fp8(tmp_path / "fp8", dtype=torch.float32, experts_implementation="kpt", quantize_activations=False)
    assert torch.float8_e4m3fn in {tensor.dtype for path, tensor in model.state_dict().items() if ".experts" in path}
    assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "wide")))


def test_an_upcycled_model_loads_in_kpt(saved, tmp_path):
    want = build("upcycled llama")
    have = load_upcycled(saved["upcycled llama"])
    assert type(have) is type(want)
    assert [type(module) for module in have.modules()] == [type(module) for module in want.modules()]
    assert torch.equal(logits(have), logits(want))
    have.save_pretrained(tmp_path)
    assert torch.equal(logits(load_upcycled(tmp_path, dtype=torch.float32)), logits(want))


def test_an_upcycled_model_upcycled_once_more_loads_in_kpt(tmp_path):
    model = upcycle(upcycled(), 2, 1, layers=[0], granularity=2, score="sigmoid")
    assert len([module for module in model.modules() if isinstance(module, MoELayer)]) == 2
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_upcycled(tmp_path)), logits(model))


def test_only_what_upcycle_made_is_loaded_as_upcycled(saved, tmp_path):
    with pytest.raises(InputError, match=r"of type 'mixtral' that was not upcycled: load it.*AutoModelForCausalLM"):
        load_upcycled(saved["converted mixtral"])
    changed = upcycled()
    (layer,) = [module for module in changed.modules() if isinstance(module, MoELayer)]
    layer.experts = QuantizedFeedForwardExpert.from_feed_forward(layer.experts)
    changed.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"other tensors than the layers .*down_proj_scale_inv.*torch\.save"):
        load_upcycled(tmp_path)


@pytest.mark.parametrize("name", ["converted mixtral", "converted deepseek_v3", "upcycled llama"])
def test_shards(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    load = load_upcycled if name.startswith("upcycled") else AutoModelForCausalLM.from_pretrained
    assert_close(logits(load(tmp_path, dtype=torch.float32)), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_torch_s_state_dict(name, tmp_path):
    model, fresh = build(name), other(name)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    assert torch.equal(logits(fresh), logits(model))
    assigned = other(name)
    assigned.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True, assign=True)
    assert torch.equal(logits(assigned), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_torch_s_distributed_state_dict(name):
    model, fresh = build(name), other(name)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(fresh, state)
    assert torch.equal(logits(fresh), logits(model))


@pytest.mark.parametrize("family", CONVERTED)
def test_state_dicts_go_both_ways_between_a_model_and_its_conversion(family):
    plain = CONVERTED[family].build()
    ours = to_kpt_layers(plain)
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.mul_(1.25)
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert_close(logits(ours), logits(plain))
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.zero_()
    plain.load_state_dict(ours.state_dict(), strict=True)
    assert_close(logits(ours), logits(plain))
    assert logits(plain).abs().max() > 0


@pytest.mark.parametrize("name", [name for name in FAMILY if not name.startswith("served")])
def test_tensors_of_a_checkpoint_are_taken_by_load_state_dict(name, saved):
    fresh = other(name)
    fresh.load_state_dict(load_file(saved[name] / "model.safetensors"), strict=True)
    assert torch.equal(logits(fresh), logits(build(name)))
    half = {
        key: value for key, value in load_file(saved[name] / "model.safetensors").items() if ".experts.0." not in key
    }
    with pytest.raises(InputError, match=r"some are missing: .*load it with from_pretrained"):
        fresh.load_state_dict(half, strict=False)


def test_other_names_are_still_refused():
    fresh = other("converted mixtral")
    state = dict(build("converted mixtral").state_dict())
    state["model.layers.0.mlp.gate.wait"] = state.pop("model.layers.0.mlp.gate.weight")
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*mlp\.gate\.weight.*Unexpected key.*mlp\.gate\.wait"):
        fresh.load_state_dict(state, strict=True)


def test_tied_embeddings_stay_tied(saved):
    model = load_upcycled(saved["upcycled llama"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(saved["upcycled llama"] / "model.safetensors")


def test_the_way_back_takes_its_hook_along():
    back = to_transformers(converted("mixtral"))
    assert not back._load_state_dict_pre_hooks
    assert not [hooks for module in back.modules() if (hooks := module._state_dict_hooks)]
