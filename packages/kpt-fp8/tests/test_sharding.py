"""FSDP2 and DistributedDataParallel, over gloo, in processes of their own."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kpt_core import InputError
from kpt_fp8 import FP8Tensor, NativeFP8Linear, convert_model_to_fp8

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
GRANULARITIES = ("tensor", "row", "1x128", "128x128", "mxfp8")


def stack(granularity, rows=256):
    torch.manual_seed(0)
    static = {"activations": "tensor", "input_scale": 0.01} if granularity == "tensor" else {}
    return nn.Sequential(
        NativeFP8Linear.from_linear(nn.Linear(256, 256), granularity=granularity),
        NativeFP8Linear.from_linear(nn.Linear(256, rows, bias=False), granularity=granularity, **static),
    )


def sharded(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def results(model, x):
    x = x.detach().requires_grad_()
    out = model(x)
    return out.detach(), *torch.autograd.grad(out.square().sum(), x)


def runs_as_one_process_does(granularity):
    plain = stack(granularity)
    model = sharded(copy.deepcopy(plain))
    processes = dist.get_world_size()
    for layer, other in zip(model, plain, strict=True):
        local = layer.weight.to_local()
        assert isinstance(local, FP8Tensor)
        assert local.codes.shape == (256 // processes, 256)
        assert list(local.scale.shape) == [
            size // processes if d == 0 else size for d, size in enumerate(other.weight_scale.shape)
        ]
    x = torch.randn(4, 256)
    for _ in range(2):  # the second time into the same memory
        for got, want in zip(results(model, x), results(plain, x), strict=True):
            assert torch.equal(got, want)


def goes_through_a_checkpoint(granularity, folder):
    plain = stack(granularity)
    model = sharded(copy.deepcopy(plain))
    state = get_model_state_dict(model)
    assert {name: each.dtype for name, each in state.items()} == {
        name: each.dtype for name, each in plain.state_dict().items()
    }
    assert all(isinstance(each, DTensor) for name, each in state.items() if "input_scale" not in name)
    dcp.save(state, checkpoint_id=folder / granularity)
    fresh = sharded(
        nn.Sequential(
            NativeFP8Linear(256, 256, granularity=granularity),
            NativeFP8Linear(
                256,
                256,
                False,
                granularity=granularity,
                static=granularity == "tensor",
                activations="tensor" if granularity == "tensor" else "none",
            ),
        )
    )
    own = get_model_state_dict(fresh)
    dcp.load(own, checkpoint_id=folder / granularity)
    set_model_state_dict(fresh, own)
    x = torch.randn(4, 256)
    assert torch.equal(fresh(x), plain(x))


def mixed_precision_leaves_codes_and_scales():
    plain = stack("tensor")
    model = sharded(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    model[0].register_forward_pre_hook(lambda layer, _: seen.append((layer.weight.dtype, layer.weight_scale.dtype)))
    x = torch.randn(4, 256)
    assert torch.equal(model(x), plain.bfloat16()(x.bfloat16()))
    assert seen == [(torch.bfloat16, torch.float32)]


def what_can_not_be_sharded_is_told():
    with pytest.raises(InputError, match="must not cut what shares a scale of granularity '128x128'"):
        sharded(stack("128x128", rows=128))
    model = sharded(stack("row", rows=127))
    with pytest.raises(InputError, match="in equal parts; got 127 rows for 2 processes: leave this layer"):
        model(torch.randn(4, 256))
    with pytest.raises(RuntimeError, match="must both be DTensors where the layer is sharded"):
        sharded(stack("row")).load_state_dict(stack("row").state_dict())


def data_parallel(rank):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with pytest.raises(InputError, match="If this came from DistributedDataParallel"):
        DistributedDataParallel(nn.Sequential(NativeFP8Linear.from_linear(dense[0])))
    model = convert_model_to_fp8(dense)
    parallel = DistributedDataParallel(copy.deepcopy(model))
    parts = torch.randn(2, 8, 64)
    for part in parts:
        (model(part).square().sum() / len(parts)).backward()
    parallel(parts[rank]).square().sum().backward()
    for got, want in zip(parallel.parameters(), model.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None) == isinstance(want, FP8Tensor)
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


def work(rank, processes, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=processes)
    for granularity in GRANULARITIES if processes > 1 else ("tensor", "row"):
        runs_as_one_process_does(granularity)
    goes_through_a_checkpoint("tensor", folder)
    mixed_precision_leaves_codes_and_scales()
    if processes > 1:
        goes_through_a_checkpoint("mxfp8", folder)
        what_can_not_be_sharded_is_told()
        data_parallel(rank)
    dist.destroy_process_group()


# One process checks nothing that two do not; that a mesh of one works at all is for `nox -s full`.
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_in_processes(processes, tmp_path: Path):
    mp.spawn(work, (processes, tmp_path), nprocs=processes)
