"""Gradients of spread experts next to data parallelism."""

from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from kpt_core import InputError

from .expert_parallel import Parallel


def fully_shard_experts(model: nn.Module, mesh: DeviceMesh, *, world_size: int, **options: Any) -> None:
    """Let FSDP2 shard spread experts further, over the ranks that hold the same ones.

    Call it after `parallelize_experts`, and before `fully_shard` of the modules around, which goes over all ranks.
    FSDP2 averages over its own mesh; an expert's gradient already is a sum over the ranks among which the experts are
    spread, so that it is divided by `world_size` instead: the result is that of one process on all tokens.

    Args:
        model: contains spread experts.
        mesh: the ranks that hold the same experts: `init_device_mesh(..., (dp, ep))["dp"]`.
        world_size: ranks over whose tokens the loss is averaged: `dp * ep`.
        options: for `fully_shard` (`reshard_after_forward`, ...). An `mp_policy` should have
            `cast_forward_inputs=False`, or the routing weights are rounded too; the tokens must have its `param_dtype`.

    Raises:
        InputError: `model` has no spread experts.

    Examples:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
        >>> parallelize_experts(model, mesh["ep"])
        >>> fully_shard_experts(model, mesh["dp"], world_size=mesh.size())
        >>> fully_shard(model, mesh=mesh["dp", "ep"]._flatten("dp_ep"))
    """
    for network in _spread(model):
        placement = {parameter: _free_dimension(parameter, mesh.size()) for parameter in network.parameters()}
        fully_shard(network, mesh=mesh, shard_placement_fn=placement.get, **options)
        sharded: Any = network
        sharded.set_gradient_divide_factor(world_size)
        # A custom factor becomes part of the reduction with NCCL; gloo can only sum.
        sharded.set_force_sum_reduction_for_comms(dist.get_backend(mesh.get_group()) != "nccl")


def average_gradients(model: nn.Module, mesh: DeviceMesh, *, expert_mesh: DeviceMesh | None = None) -> None:
    """Average gradients over the ranks of `mesh`, after backward: data parallelism without FSDP or DDP.

    For a job that keeps everything but the experts on every rank, such as one with expert parallelism alone. Every rank
    must call it. A parameter that got a gradient on some ranks only counts as zero on the others, and has the average
    on all of them afterwards; so that they agree, the host waits for one small exchange.

    Args:
        model: contains spread experts, and the same parameters on every rank.
        mesh: all ranks whose tokens the loss is averaged over, in one dimension.
        expert_mesh: the ranks that hold the same experts; None if each expert is on one rank only.

    Raises:
        InputError: `model` has no spread experts.
    """
    experts = {parameter for network in _spread(model) for parameter in network.parameters()}
    parameters = list(model.parameters())
    # Which have a gradient on any rank.
    found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=mesh.device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group())
    for parameter in compress(parameters, found.tolist()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        group = mesh if parameter not in experts else expert_mesh
        if group is not None:
            dist.all_reduce(grad, group=group.get_group())
        grad.div_(mesh.size())


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    torch's own does not take parameters of several device meshes at once, which spread experts and the rest are.

    Args:
        model: whose gradients to scale, in place.
        max_norm: bound of the 2-norm of all gradients together.

    Returns:
        0-d: the norm before, the same on all ranks.
    """
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            kinds.setdefault(mesh, []).append(parameter)
    norms = []
    for parameters in kinds.values():
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for parameters in kinds.values():
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _spread(model: nn.Module) -> list[Any]:
    networks = [module for module in model.modules() if isinstance(module, Parallel)]
    if not networks:
        raise InputError(f"{type(model).__name__} has no spread experts; call parallelize_experts first")
    return networks


def _free_dimension(parameter: nn.Parameter, ranks: int) -> Shard:
    """A dimension that is not split yet and divides, so that each rank's piece stays one piece; else the experts."""
    taken = {p.dim for p in parameter.placements if hasattr(p, "dim")} if isinstance(parameter, DTensor) else set()
    free = (dim for dim in range(1, parameter.dim()) if dim not in taken and parameter.shape[dim] % ranks == 0)
    return Shard(next(free, 0))
