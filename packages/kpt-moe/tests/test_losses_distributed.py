"""Losses over two ranks, in two processes with gloo, against one process with all tokens."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from kpt_moe import MoEConfig, MoELayer
from kpt_moe.losses import (
    GlobalLoad,
    entropy_loss,
    global_batch_loss,
    sequence_loss,
    switch_loss,
    z_loss,
)
from kpt_moe.router_losses import RouterLosses
from kpt_moe.scheduling import UtilisationMonitor
from routings import routing_from_logits

RANKS, EXPERTS, TOP_K = 2, 5, 2
#: The ranks hold 4 and 8 tokens, of one and of two sequences.
PARTS = (slice(0, 4), slice(4, 12))


def batch():
    torch.manual_seed(0)
    mask = torch.ones(12, dtype=torch.bool)
    mask[torch.tensor([1, 2, 7])] = False
    return torch.randn(12, EXPERTS, dtype=torch.float64), mask


def layer():
    torch.manual_seed(0)
    return MoELayer(MoEConfig(hidden_size=8, num_experts=EXPERTS, top_k=TOP_K, intermediate_size=4)).double()


def losses(group, logits, mask):
    """Each loss whose mean over the ranks is exact."""
    routing = routing_from_logits(logits, top_k=TOP_K, mask=mask)
    return {
        "global": global_batch_loss(routing, load=GlobalLoad(group)),
        "z": z_loss(routing, group=group),
        "token_entropy": entropy_loss(routing, per_token=True, group=group),
        "sequence": sequence_loss(routing, batch_size=logits.shape[0] // 4, group=group),
        "switch": switch_loss(routing, group=group),
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    logits, mask = batch()
    part = logits[PARTS[rank]].clone().requires_grad_()
    results = {}
    for name, loss in losses(group, part, mask[PARTS[rank]]).items():
        results[name] = loss.detach(), torch.autograd.grad(loss, part, retain_graph=True)[0]

    load = GlobalLoad(group)
    for half in (slice(0, 2), slice(2, 4)):
        loss = global_batch_loss(routing_from_logits(part[PARTS[0]][half], top_k=TOP_K), load=load)
    results["accumulated"] = loss.detach(), torch.autograd.grad(loss, part)[0]

    torch.manual_seed(1)
    x = torch.randn(12, 8, dtype=torch.float64)[PARTS[rank]]
    model = DistributedDataParallel(layer())
    router_losses = RouterLosses(model, global_batch=0.1, z=0.2, group=group)
    monitor = UtilisationMonitor(model, every=1, group=group)
    # DDP takes the mean over the ranks, of which this is a sum.
    task = RANKS * model(x, mask=mask[PARTS[rank]]).square().sum()
    total = router_losses.total()
    (task + total).backward()
    results["ddp"] = total.detach(), model.module.router.weight.grad
    results["asked"] = monitor.step()["module.router"].asked
    torch.save(results, f"{folder}/{rank}.pt")
    # torch joins the group's threads with the interpreter locked where something else frees it, and may wait for ever.
    del model, router_losses, monitor, load, group
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]


@pytest.mark.parametrize("name", ["global", "z", "token_entropy", "sequence"])
def test_mean_over_ranks_is_the_loss_of_all_tokens(name, ranks):
    logits, mask = batch()
    logits.requires_grad_()
    want = losses(None, logits, mask)[name]
    torch.testing.assert_close(sum(rank[name][0] for rank in ranks) / RANKS, want.detach())
    (gradient,) = torch.autograd.grad(want, logits)
    # A parameter's gradient is a sum over tokens, of which DDP takes the mean over ranks.
    torch.testing.assert_close(torch.cat([rank[name][1] for rank in ranks]) / RANKS, gradient)


def test_switch_loss_is_weighted_by_tokens(ranks):
    logits, mask = batch()
    parts = [switch_loss(routing_from_logits(logits[part], top_k=TOP_K, mask=mask[part])) for part in PARTS]
    counted = [int(mask[part].sum()) for part in PARTS]
    want = sum(loss * count for loss, count in zip(parts, counted, strict=True)) / sum(counted)
    torch.testing.assert_close(sum(rank["switch"][0] for rank in ranks) / RANKS, want)


def test_last_micro_batch_knows_the_choices_of_all_ranks_and_micro_batches(ranks):
    logits, _ = batch()
    mine = [logits[part][:4] for part in PARTS]
    asked = routing_from_logits(torch.cat(mine), top_k=TOP_K).asked_per_expert() / (8 * TOP_K)
    last = torch.cat([part[2:] for part in mine]).requires_grad_()
    want = EXPERTS * (asked * last.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(sum(rank["accumulated"][0] for rank in ranks) / RANKS, want.detach())
    (gradient,) = torch.autograd.grad(want, last)
    torch.testing.assert_close(torch.cat([rank["accumulated"][1][2:4] for rank in ranks]) / RANKS, gradient)


def test_under_ddp_values_and_gradients_are_those_of_one_process(ranks):
    _, mask = batch()
    torch.manual_seed(1)
    x = torch.randn(12, 8, dtype=torch.float64)
    model = layer()
    router_losses, monitor = RouterLosses(model, global_batch=0.1, z=0.2), UtilisationMonitor(model, every=1)
    task = model(x, mask=mask).square().sum()
    want = router_losses.total()
    (task + want).backward()
    torch.testing.assert_close(sum(rank["ddp"][0] for rank in ranks) / RANKS, want.detach())
    asked = monitor.step()["router"].asked
    for rank in ranks:
        torch.testing.assert_close(rank["ddp"][1], model.router.weight.grad)
        assert rank["asked"] == asked
