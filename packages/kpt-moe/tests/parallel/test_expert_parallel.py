"""Spread experts together with tensor and data parallelism, and their checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from kpt_moe import MoEConfig, MoELayer
from kpt_moe.parallel import (
    average_gradients,
    clip_grad_norm,
    contiguous_shards,
    fully_shard_experts,
    parallelize_experts,
    restore_shards,
)

HIDDEN = 8
TOKENS = 5


def layer(*, bias=True, **options):
    options["bias"] = bias
    torch.manual_seed(3)
    config = MoEConfig(
        hidden_size=HIDDEN,
        num_experts=4,
        top_k=2,
        intermediate_size=6,
        num_shared_experts=1,
        **{"bias": True, **options},
    )
    made = MoELayer(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moe = nn.Linear(HIDDEN, HIDDEN), layer()

    def forward(self, x):
        x = self.first(x)
        return x + self.moe(x)


def model():
    made = Model()
    with torch.no_grad():
        made.first.weight.copy_(torch.linspace(-1, 1, HIDDEN * HIDDEN).view(HIDDEN, HIDDEN))
        made.first.bias.zero_()
    return made


def batch(step, part):
    make = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(TOKENS, HIDDEN, generator=make)


def full(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def full_state(module):
    return {name: full(value) for name, value in module.state_dict().items()}


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def train(module, optimizer, parts, of, after_backward=lambda: None, steps=3):
    """Losses of some steps on some of the `of` parts of each batch."""
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(module(batch(step, part)).square().mean() for part in parts) / len(parts)
        loss.backward()
        after_backward()
        norms.append(clip_grad_norm(module, 0.7).detach())
        optimizer.step()
        total = loss.detach() * len(parts) / of
        if len(parts) < of:
            dist.all_reduce(total)
        losses.append(total)
    return torch.stack(losses + norms)


def single(parts):
    reference = model()
    losses = train(reference, adam(reference), range(parts), parts)
    return losses, full_state(reference)


def assert_state(actual, expected, **tolerance):
    assert list(actual) == list(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def trains_with_fsdp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = mesh["dp", "ep"]._flatten("dp_ep")
    spread = parallelize_experts(model(), mesh["ep"], chunks=2)
    fully_shard_experts(spread, mesh["dp"], world_size=4)
    fully_shard(spread, mesh=everyone)
    losses = train(spread, adam(spread), [rank], 4)
    expected_losses, expected = single(4)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_state(full_state(spread), expected, rtol=1e-5, atol=1e-5)
    return True


def trains_with_averaged_gradients(rank):
    for shape in ((2, 2), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        everyone = mesh._flatten("everyone")
        spread = parallelize_experts(model(), mesh["ep"])
        dp = mesh["dp"] if shape[0] > 1 else None
        losses = train(
            spread, adam(spread), [rank], 4, lambda s=spread, d=dp, e=everyone: average_gradients(s, e, expert_mesh=d)
        )
        expected_losses, expected = single(4)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
        assert_state(full_state(spread), expected, rtol=1e-5, atol=1e-5)
    return True


def a_rank_without_tokens_takes_part(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    spread, reference = parallelize_experts(layer(), mesh, chunks=2), layer()
    tokens = batch(0, rank) if rank != 2 else torch.empty(0, HIDDEN)
    spread(tokens).square().sum().backward()
    average_gradients(spread, mesh._flatten("all"))
    (torch.stack([reference(batch(0, part)).square().sum() for part in (0, 1, 3)]).sum() / 4).backward()
    ours, theirs = ({name: full(p.grad) for name, p in made.named_parameters()} for made in (spread, reference))
    assert_state(ours, theirs, rtol=1e-5, atol=1e-5)
    return True


def splits_width(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    ep = mesh["ep"].get_local_rank()
    for activation in ("swiglu", "relu"):
        for bias in (True, False):
            reference = layer(activation=activation, bias=bias).double()
            spread = layer(activation=activation, bias=bias).double()
            parallelize_experts(spread, mesh["ep"], tensor_parallel_mesh=mesh["tp"])
            inputs = [batch(0, part).double().requires_grad_() for part in range(2)]
            outputs = [reference(x) for x in inputs]
            sum(out.square().sum() for out in outputs).backward()
            x = batch(0, ep).double().requires_grad_()
            out = spread(x)
            out.square().sum().backward()
            torch.testing.assert_close(out, outputs[ep], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x.grad, inputs[ep].grad, rtol=1e-12, atol=1e-12)
            ours, theirs = (
                {name: full(parameter.grad) for name, parameter in made.experts.named_parameters()}
                for made in (spread, reference)
            )
            assert_state(ours, theirs, rtol=1e-11, atol=1e-11)
            assert_state(full_state(spread), full_state(reference))
    # Nothing hangs where both ranks that split a width have no tokens.
    nothing = layer(activation=activation, bias=False).double()
    parallelize_experts(nothing, mesh["ep"], tensor_parallel_mesh=mesh["tp"], chunks=2)
    nothing(batch(0, 0).double() if ep else torch.empty(0, HIDDEN).double()).sum().backward()
    # Each rank holds matching rows of gate and up.
    local = spread.experts.gate_up_proj.to_local()
    assert local.shape == (2, 3, HIDDEN)
    return True


def saves(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    spread = parallelize_experts(layer(), mesh["ep"], tensor_parallel_mesh=mesh["tp"])
    optimizer = adam(spread)
    spread(batch(0, 0)).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    dcp.save({"model": spread.state_dict(), "optimizer": contiguous_shards(state)}, checkpoint_id=f"{folder}/tp")
    restored = restore_shards(contiguous_shards(state), state)
    for entry, old in zip(restored["state"].values(), state["state"].values(), strict=True):
        assert torch.equal(full(entry["exp_avg"]), full(old["exp_avg"]))

    again = parallelize_experts(layer(), mesh["ep"], tensor_parallel_mesh=mesh["tp"])
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    wanted = {"model": again.state_dict()}
    dcp.load(wanted, checkpoint_id=f"{folder}/tp")
    again.load_state_dict(wanted["model"])
    assert_state(full_state(again), full_state(spread), rtol=0, atol=0)
    assert type(again.experts.gate_up_proj.placements[1]) is type(spread.experts.gate_up_proj.placements[1])
    torch.testing.assert_close(again(batch(1, 0)), spread(batch(1, 0)), rtol=0, atol=0)

    flat = init_device_mesh("cpu", (4,))
    spread = parallelize_experts(layer(), flat)
    dcp.save({"model": spread.state_dict()}, checkpoint_id=f"{folder}/ep")

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "node", "local"))
    spread = parallelize_experts(layer(), mesh["node", "local"])
    fully_shard_experts(spread, mesh["dp"], world_size=4)
    fully_shard(spread, mesh=mesh._flatten("everyone"))
    optimizer = adam(spread)
    spread(batch(0, 0)).square().sum().backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(spread, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/fsdp")
    return {name: value.clone() for name, value in full_state(again).items()}


def loads(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        spread = parallelize_experts(MoELayer(layer().config), mesh)
    spread.to_empty(device="cpu")
    assert isinstance(spread.experts.down_proj, DTensor)
    assert spread.experts.down_proj.to_local().shape[0] == 2
    state = {"model": spread.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/ep")
    spread.load_state_dict(state["model"])
    reference = layer()
    assert_state(full_state(spread), full_state(reference), rtol=0, atol=0)
    torch.testing.assert_close(spread(batch(0, rank)), reference(batch(0, rank)), rtol=1e-6, atol=1e-6)
    return True


def stepped_alone():
    """What four ranks with the same tokens make of a layer in one step."""
    alone = layer()
    optimizer = adam(alone)
    alone(batch(0, 0)).square().sum().backward()
    optimizer.step()
    return alone, optimizer


def on_four(rank):
    checks = (trains_with_fsdp, trains_with_averaged_gradients, a_rank_without_tokens_takes_part, splits_width)
    return all(check(rank) for check in checks)


def test_trains_as_one_process_next_to_data_and_tensor_parallelism(launch):
    assert launch(4, on_four) == [True] * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_of_four_ranks_is_read_by_two_and_by_one(launch, tmp_path):
    (stepped, *_) = launch(4, saves, str(tmp_path))
    assert launch(2, loads, str(tmp_path)) == [True, True]
    alone, optimizer = stepped_alone()
    expected, expected_optimizer = get_state_dict(alone, optimizer)
    state, optimizer_state = tree_map(torch.zeros_like, (expected, expected_optimizer["state"]))
    read = {"model": state, "optimizer": {**expected_optimizer, "state": optimizer_state}}
    dcp.load(read, checkpoint_id=str(tmp_path / "fsdp"))
    assert_state(state, expected, rtol=1e-5, atol=1e-5)
    for name, entry in expected_optimizer["state"].items():
        torch.testing.assert_close(optimizer_state[name]["exp_avg"], entry["exp_avg"], rtol=1e-5, atol=1e-5)

    for kind, expected in (("ep", full_state(layer())), ("tp", stepped)):
        alone = layer()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.zero_()
        state = {"model": alone.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path / kind))
        assert_state(state["model"], expected, rtol=0, atol=0)
