"""accelerate's offloading to host memory and disk, and torch's data parallelism."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from round_trip_kinds import MODELS, build, logits, other
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from conversion_models import CONVERTED, PROMPT, assert_close
from kpt_core import InputError
from kpt_moe.conversion import load_upcycled, to_kpt_layers

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning"),
]


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_host_memory(name):
    want = logits(build(name))
    model = cpu_offload(build(name), execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("name", MODELS)
def test_experts_on_disk(name, tmp_path):
    want = logits(build(name))
    model = disk_offload(build(name), tmp_path, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(logits(model), want)
    remove_hook_from_submodules(model)
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize("name", MODELS)
def test_a_device_map_of_cpu_and_disk(name, tmp_path):
    want = logits(build(name))
    model = build(name)
    places = {f"model.{path}": "cpu" for path, _ in model.model.named_children() if path != "layers"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "cpu"}
    dispatched = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path / "offload"))
    assert next(dispatched.model.layers[1].parameters()).device.type == "meta"
    assert torch.equal(logits(dispatched), want)

    dispatched.save_pretrained(tmp_path / "saved")
    load: Any = load_upcycled if name.startswith("upcycled") else AutoModelForCausalLM.from_pretrained
    assert_close(logits(load(tmp_path / "saved", dtype=torch.float32)), want)


@pytest.mark.parametrize(
    ("family", "ours", "theirs"),
    [
        ("hunyuan_v1_moe", "gate.weight", "gate.wg.weight"),
        ("nemotron_h", "experts.gate_up_proj", "experts.up_proj"),
    ],
)
def test_weights_that_accelerate_would_not_find_are_refused(family, ours, theirs):
    model = cpu_offload(to_kpt_layers(CONVERTED[family].build()), execution_device=torch.device("cpu"))
    with pytest.raises(InputError, match=rf"can't offload {ours}, which checkpoints call {theirs}.*kpt_moe\.offload"):
        logits(model)


def test_offloaded_models_are_converted_before():
    model = cpu_offload(build("served mixtral"), execution_device=torch.device("cpu"))
    with pytest.raises(InputError, match=r"was replaced \(by hooks of accelerate\?\)"):
        to_kpt_layers(model, strict=True)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel(name, one_rank):
    plain, model = build(name).train(), build(name).train()
    parallel = DistributedDataParallel(model)
    plain(PROMPT, labels=PROMPT).loss.backward()
    parallel(PROMPT, labels=PROMPT).loss.backward()
    for (path, have), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (have.grad is None) == (want.grad is None), path
        assert have.grad is None or torch.equal(have.grad, want.grad), path
    fresh = DistributedDataParallel(other(name))
    fresh.load_state_dict(parallel.state_dict(), strict=True)
    assert torch.equal(logits(fresh.module), logits(plain))
