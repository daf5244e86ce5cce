"""`FP8TrainingExperts`, and engines of several processes that decide alike."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import transformers_models
from kpt_core import InputError
from kpt_fp8 import NativeFP8Experts, convert_model_to_fp8
from kpt_fp8.training import (
    FP8TrainingEngine,
    FP8TrainingExperts,
    Guards,
    convert_to_fp8_training,
    update_delayed_scales,
)


@pytest.fixture
def experts():
    model = transformers_models.model("mixtral")
    return model.model.layers[0].mlp.experts


def routed(tokens=24, of=4):
    index = torch.randint(of, (tokens, 2))
    return torch.randn(tokens, 128), index, torch.rand(tokens, 2)


@pytest.mark.parametrize(("recipe", "error"), [("none", 1e-5), ("row", 0.08), ("block", 0.08), ("tensor", 0.08)])
def test_experts_compute_what_they_did_and_train_the_same_parameters(experts, recipe, error):
    made = FP8TrainingExperts.from_experts(experts, recipe).train()
    assert made.gate_up_proj is experts.gate_up_proj
    x, index, weights = routed()
    grads = []
    for module in (experts, made):
        leaf = x.clone().requires_grad_()
        out = module(leaf, index, weights)
        out.square().sum().backward()
        grads.append([out.detach(), leaf.grad, experts.gate_up_proj.grad.clone(), experts.down_proj.grad.clone()])
        experts.zero_grad()
    for want, got in zip(*grads, strict=True):
        assert (got - want).norm() <= error * 2 * want.norm()
    # "none" multiplies as ever; the others must have quantised.
    assert bool(made.first_products.observed.any()) is (recipe != "none")


def test_a_model_s_experts_are_converted_and_their_loss_falls():
    model = transformers_models.model("mixtral").train()
    left = convert_to_fp8_training(model, "row")
    converted = [module for module in model.modules() if isinstance(module, FP8TrainingExperts)]
    assert len(converted) == 2
    assert "lm_head" in left
    engine = FP8TrainingEngine(model, torch.optim.AdamW(model.parameters(), 1e-3))
    ids = transformers_models.IDS
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        engine.step(loss)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert any("experts.first_products" in name for name in engine.layers)


def test_ids_past_the_experts_contribute_nothing(experts):
    made = FP8TrainingExperts.from_experts(experts, "row")
    x, index, weights = routed()
    without = made(x, torch.full_like(index, 4), weights)
    assert not without.any()


def test_what_are_no_experts_is_refused():
    with pytest.raises(InputError, match="it holds no experts as transformers fuses them"):
        FP8TrainingExperts.from_experts(nn.Linear(8, 8))


def test_a_trained_model_with_experts_is_saved_as_it_was_and_converted_in_one_call(tmp_path):
    plain = transformers_models.model("mixtral")
    trained = copy.deepcopy(plain)
    convert_to_fp8_training(trained, "delayed")
    trained(transformers_models.IDS)
    update_delayed_scales(trained)
    assert trained.state_dict().keys() == plain.state_dict().keys()
    trained.save_pretrained(tmp_path)
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    logits = transformers_models.logits
    assert torch.equal(logits(again), logits(plain))
    pytest.importorskip("kpt_moe")
    converted = convert_model_to_fp8(trained)
    assert isinstance(converted.model.layers[0].mlp.experts, NativeFP8Experts)
    assert torch.equal(logits(converted), logits(convert_model_to_fp8(plain)))


def without_an_engine(rank):
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_fp8_training(model, "delayed")
    wrapped = nn.parallel.DistributedDataParallel(model)
    saturated = []
    for _ in range(3):
        wrapped(torch.randn(64, 64) * 8**rank).square().mean().backward()
        saturated.append(float(model[0].observed[:, 1].max()))
        update_delayed_scales(wrapped)
    return saturated, model[0].scales


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    convert_to_fp8_training(model, "delayed")
    wrapped = nn.parallel.DistributedDataParallel(model)
    engine = FP8TrainingEngine(wrapped, torch.optim.SGD(model.parameters(), 1e-2), guards=Guards(loss_scale=8.0))
    torch.manual_seed(1 + rank)
    told = []
    for step in range(4):
        x = torch.randn(16, 64)
        if rank == 1 and step == 2:
            x[0, 0] = torch.inf  # seen by one process alone
        report = engine.step(wrapped(x).square().mean())
        told.append((report.outcome, report.loss_scale))
    weights = [p.detach().clone() for p in model.parameters()]
    scales = [layer.scales.clone() for layer in engine.layers.values()]
    torch.save((told, weights, scales, *without_an_engine(rank)), folder / f"{rank}.pt")
    # What holds the group goes before it: torch joins the group's threads with the interpreter locked, and one of them
    # may wait for that lock.
    del wrapped, engine
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (folder,), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def test_delayed_scales_without_an_engine_fit_what_all_processes_saw(found):
    (*_, saturated, scales), (*_, saturated_1, scales_1) = found
    assert saturated == saturated_1 == [0, 0, 0]
    assert torch.equal(scales, scales_1)


def test_processes_skip_the_same_steps_and_share_their_scales(found):
    (told, weights, scales, *_), (told_1, weights_1, scales_1, *_) = found
    assert told == told_1
    assert [action for action, _ in told] == ["taken", "taken", "skipped", "taken"]
    assert all(map(torch.equal, weights, weights_1))
    assert all(map(torch.equal, scales, scales_1))


def test_copies_of_experts_have_weights_of_their_own(experts):
    made = FP8TrainingExperts.from_experts(experts, "row")
    copied = copy.deepcopy(made)
    with torch.no_grad():
        made.down_proj.zero_()
    assert copied(*routed()).any()
