"""What a user of a TPU meets, area by area.

Without torch-xla a TPU is simulated: what is decided is shown, not what a TPU does. What is computed on `xla` is run by
`nox -s tpu` on XLA's CPU, here and in test_torch_xla.py and test_spmd.py.
"""

import copy
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import kpt_core
from kpt_backend_tpu import (
    BACKEND,
    Bucketed,
    TPUBackend,
    TPUConfig,
    TPUOptimizer,
    compilations,
    device_info,
    environment,
    keep_compilations,
    memory_stats,
    powers_of_two,
    shard_attention,
    shard_experts,
)
from kpt_core import InputError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer
from kpt_optimize.memory import estimate
from kpt_optimize.model import OptimizationWarning, OptimizerConfig

HAS_XLA = importlib.util.find_spec("torch_xla") is not None and BACKEND.unavailable() is None
on_xla = pytest.mark.skipif(not HAS_XLA, reason="needs torch-xla")
QUICK = OptimizerConfig(compile_backend="eager", seconds=0.05)


class Sent(nn.Module):
    """A model that remembers where it was sent, and stays."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear, self.sent = nn.Linear(rows, columns), []

    def to(self, *args, **kwargs):
        self.sent.append(kwargs)
        return self


# Configuration


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float32, None])
@pytest.mark.parametrize("training", [False, True])
def test_every_setting_is_obeyed(see, dtype, training):
    see("v6e", "v6e")
    config = TPUConfig.from_mapping({"device": 1, "dtype": dtype, "pad": True})
    prepared = TPUBackend(config).prepare_model(Sent(63, 130), for_training=training)
    expected = torch.bfloat16 if dtype == "bfloat16" else dtype
    assert prepared.model.sent == [{"device": torch.device("xla", 1), "dtype": expected}]
    assert prepared.model.training == training
    (padded,) = prepared.padding.padded
    assert padded.aligned_shape == ((136, 64) if dtype == "bfloat16" else (132, 64))


WRONG = {
    "a dtype": (lambda: TPUConfig(dtype="int8"), "dtype must be one of float64, float32, bfloat16"),
    "a switch": (lambda: TPUConfig(pad=1), "pad must be True or False; got 1"),
    "a device of another vendor": (lambda: TPUConfig(device="cuda:0"), "must be of type xla; got 'cuda:0'"),
    "a setting that there is not": (lambda: TPUConfig.from_mapping({"dtpye": "bfloat16"}), "did you mean.*dtype"),
    "a setting of CUDA": (lambda: TPUConfig(allow_tf32=True), "allow_tf32 must be left as it is on a TPU"),
    "a share of the memory": (lambda: TPUConfig(memory_fraction=0.5), "memory_fraction must be left as it is"),
    "a model of another kind": (lambda: BACKEND.prepare_model(nn.Linear), r"must be a torch\.nn\.Module"),
    "no model to prepare": (lambda: BACKEND.prepare_model(None), r"must be a torch\.nn\.Module; got None"),
    "no model to optimise": (lambda: TPUOptimizer(config=QUICK).optimize_for_inference(None), "model"),
    "no model to train": (lambda: TPUOptimizer(config=QUICK).optimize_for_training(None, torch.ones(2)), "model"),
    "a level": (lambda: TPUOptimizer("fast"), "fast"),
    "an objective": (lambda: OptimizerConfig(objective="beauty"), "beauty"),
    "a budget": (lambda: OptimizerConfig(max_error=-1.0), "-1"),
    "a time": (lambda: OptimizerConfig(seconds=0), "seconds must be above 0"),
    "a dtype of products": (lambda: OptimizerConfig(dtype=torch.float64), "torch.bfloat16 or torch.float16"),
    "a step to skip": (lambda: TPUOptimizer(config=OptimizerConfig(skip=frozenset({"compiel"}))), "compile"),
    "sizes of buckets": (lambda: Bucketed(nn.Identity(), (8, 8)), r"must be positive and rise; got \[8, 8\]"),
    "no sizes": (lambda: Bucketed(nn.Identity(), ()), r"must be positive and rise; got \[\]"),
    "ends of powers": (lambda: powers_of_two(8, 4), "must be positive and rise; got 8 and 4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_with_what_was_expected(what):
    make, says = WRONG[what]
    with pytest.raises((InputError, UnknownNameError), match=says):
        make()


# Optimisation configuration


def test_optimisation_configuration_is_xlas_unless_another_is_given():
    found = TPUOptimizer().config
    assert found.compile_backend == "openxla"
    assert found.skip == {"channels_last", "cuda_graph", "fused_optimizer"}  # XLA's own, and what torch_xla fails in
    assert TPUOptimizer(config=QUICK).config is QUICK


@pytest.mark.parametrize("skipped", ["compile", "mixed_precision", "padding"])
def test_optimisation_configuration_decides_what_is_tried(skipped):
    config = OptimizerConfig(compile_backend="eager", seconds=0.01, skip=frozenset({skipped}))
    model, x = nn.Sequential(nn.Linear(63, 65)), torch.randn(4, 63)
    tried = {
        each.step: each.reason for each in TPUOptimizer(config=config).optimize_for_inference(model, x).report.outcomes
    }
    assert [step for step, reason in tried.items() if reason == "skipped, as the configuration says"] == [skipped]


@pytest.mark.parametrize(
    ("level", "left_out"),
    [
        ("conservative", {"tf32", "mixed_precision", "cuda_graph"}),
        ("balanced", {"cuda_graph"}),
        ("aggressive", set()),
    ],
)
def test_levels_allow_more_and_more(level, left_out):
    found = TPUOptimizer(level, config=QUICK).optimize_for_inference(nn.Linear(16, 16), torch.randn(2, 16)).report
    assert {each.step for each in found.outcomes if each.reason.startswith("belongs to level")} == left_out


def test_without_sample_inputs_nothing_is_tried_and_that_is_said():
    with pytest.warns(OptimizationWarning, match="without sample inputs nothing can be measured"):
        found = TPUOptimizer(config=QUICK).optimize_for_inference(nn.Linear(4, 4))
    assert "compile" not in found.report.kept


def test_the_original_is_left_as_it_was():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    found = TPUOptimizer("aggressive", config=QUICK).optimize_for_inference(model, {"input": x})
    assert torch.allclose(found.model(input=x), model(x), atol=0.1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


# XLA's compilations


PROGRAM = """
import json, sys
import torch
from kpt_backend_tpu import compilations, keep_compilations
before = compilations()
folder = keep_compilations(sys.argv[1], read_only=sys.argv[2] == "read")
x = torch.ones(4, 4).to("xla")
for _ in range(2):
    assert (x @ x).sum().item() == 64
try:
    keep_compilations(folder)
    late = ""
except Exception as error:
    late = str(error)
done = compilations() - before
print(json.dumps({"compiled": done.compiled, "cached": done.cached, "loaded": done.loaded, "late": late,
                  "unreadable": done.unreadable, "seconds": done.seconds}))
"""


def computed(folder, mode):
    done = subprocess.run([sys.executable, "-c", PROGRAM, folder, mode], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@on_xla
def test_compilations_are_counted_and_kept_for_processes_to_come(tmp_path):
    first, kept = computed(tmp_path / "kept", "write"), sorted((tmp_path / "kept").iterdir())
    assert (first["compiled"], first["cached"], first["loaded"], first["unreadable"]) == (1, 1, 0, 0)
    assert first["seconds"] > 0
    assert "call it before anything is computed" in first["late"]
    assert len(kept) == 1
    assert kept[0].stat().st_size > 100
    again = computed(tmp_path / "kept", "read")
    assert again["loaded"] + again["unreadable"] == 1  # XLA's CPU can't read what it wrote
    assert again["compiled"] == again["unreadable"]


@on_xla
def test_compilations_are_not_kept_by_who_only_reads(tmp_path):
    assert computed(tmp_path, "read")["compiled"] == 1
    assert list(tmp_path.iterdir()) == []


@on_xla
def test_a_folder_of_compilations_that_can_not_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file.* can't be a folder: "):
        keep_compilations(tmp_path / "file")


# Memory


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_memory_is_told_and_what_is_free_follows(see, chip):
    total = BACKEND.products[device_name(see, chip)].memory << 30
    see.memory.update(bytes_used=1 << 30, bytes_limit=total)
    found = memory_stats()
    assert (found.total, found.free, found.allocated, found.allocated_peak) == (total, total - 2**30, 2**30, 2**30)


def device_name(see, chip):
    see.memory = {"bytes_used": 0, "bytes_limit": 1}
    see(chip, memory=see.memory)
    return BACKEND.device_name(torch.device("xla", 0))


def test_a_training_step_is_estimated_without_a_device():
    found = estimate(nn.Linear(30, 50), torch.ones(2, 30))
    assert found.parameters == found.gradients == 4 * (30 * 50 + 50)


# Error handling


@pytest.mark.parametrize(
    "ask",
    [
        device_info,
        memory_stats,
        BACKEND.device,
        compilations,
        lambda: keep_compilations("never"),
        lambda: shard_experts(nn.Linear(2, 2), None),
        lambda: shard_attention(nn.Identity(), None),
        lambda: TPUOptimizer(device="xla"),
    ],
)
@pytest.mark.parametrize(
    ("found", "installed", "says"),
    [
        ((), {}, "take a TPU VM"),
        (("v6e",), {}, "pip install './packages/kpt-backend-tpu"),
        (("v6e",), {"torch-xla": "1.0"}, "pip install './packages/kpt-backend-tpu"),
    ],
)
def test_error_handling_names_what_is_missing_and_the_next_step(see, ask, found, installed, says):
    see(*found, distributions=installed)
    with pytest.raises(InputError, match=says):
        ask()
    assert says in environment().problems[0]


@pytest.mark.parametrize("found", [(), ("v5p",)])
def test_error_handling_leaves_the_model_usable_where_there_is_no_tpu(see, found):
    see(*found, distributions={})
    model, x = nn.Linear(7, 5), torch.randn(2, 7)
    before = model(x)
    prepared = TPUBackend(TPUConfig(dtype="bfloat16", pad=True)).prepare_model(model)
    assert prepared.device == torch.device("cpu")
    assert str(prepared).startswith("the model stays where it is: ")
    assert torch.equal(model(x), before)


def test_error_handling_takes_a_model_back_that_does_not_fit(see):
    class Large(nn.Linear):
        def to(self, *args, **kwargs):
            if kwargs:
                raise torch.OutOfMemoryError("RESOURCE_EXHAUSTED: Out of memory allocating 2 GiB")
            homes.append(args[0])
            return self

    homes: list[torch.device] = []
    see("v5e")
    with pytest.raises(torch.OutOfMemoryError, match="RESOURCE_EXHAUSTED"):
        BACKEND.prepare_model(Large(4, 4))
    assert homes == [torch.device("cpu")]


def test_error_handling_refuses_a_device_that_is_not_there(see):
    see("v4")
    with pytest.raises(InputError, match="xla:7 was asked for; torch has 1 of them"):
        TPUBackend(TPUConfig(device=7)).prepare_model(nn.Linear(2, 2))


# Integration


@on_xla
def test_a_layer_of_experts_is_prepared_and_run():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden_size=32, num_experts=4, top_k=2, intermediate_size=48)).eval()
    x = torch.randn(10, 32)
    expected = copy.deepcopy(layer)(x)
    prepared = TPUBackend(TPUConfig(dtype="bfloat16")).prepare_model(layer)
    with torch.no_grad(), kpt_core.record() as selections:
        found = prepared.model(x.to(prepared.device, torch.bfloat16))
    assert prepared.device == torch.device("xla", 0)
    assert "tpu" in {each.backend for each in selections}
    torch.testing.assert_close(found.cpu().float(), expected, rtol=5e-2, atol=5e-2)
