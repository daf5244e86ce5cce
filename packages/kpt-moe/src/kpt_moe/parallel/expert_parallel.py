"""Experts spread over the ranks of a device mesh."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from kpt_core import InputError
from kpt_moe._mixed import Mixed, mixed
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.routing import Routing

from . import tensor_parallel
from .checkpoint import one_piece
from .dispatch import dispatch, experts_per_rank

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a network's experts are."""

    groups: tuple[dist.ProcessGroup, ...]  # the ranks that share the experts, outermost level first
    chunks: int  # as for `dispatch`
    width: dist.ProcessGroup | None  # the ranks that split the experts' inner width

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Layout":
        # A copy of a network is spread over the same ranks; their groups cannot be copied.
        return self


def parallelize_experts(
    model: _Model, mesh: DeviceMesh, *, chunks: int = 1, tensor_parallel_mesh: DeviceMesh | None = None
) -> _Model:
    """Leave to each rank its part of the experts of every `ExpertNetwork` in `model`, in place.

    The parameters become DTensors of their full shape, `Shard(0)` over `mesh`, under the names they had: state dicts,
    optimizers (with `foreach=True` in a parameter group of their own) and `torch.distributed.checkpoint` take them as
    they are; for `torch.nn.utils.clip_grad_norm_` there is `clip_grad_norm`. Every rank must have the same parameters
    before (same seed or same checkpoint: nothing is sent), or parameters on the meta device, to be materialised
    afterwards by `model.to_empty(device=...)` and a checkpoint. Make the optimizer afterwards.

    Each rank then calls the model with its own tokens, and all ranks of `mesh` must call it equally often, forward and
    backward (see `dispatch`). An expert's gradient is the sum over the tokens of all ranks of `mesh`: where the loss is
    averaged over `n` ranks, it is `n` times too large. `fully_shard_experts` and `average_gradients` see to that.
    Routers remain as they are and see the tokens of their rank: capacities and balancing losses count those.

    A rank that ends, or is not there within the timeout of the process group, raises `KptError` on the others with
    gloo; with NCCL torch's watchdog ends the process. The timeout is that of `init_process_group(timeout=...)`: choose
    it a few times above the slowest step (saving a checkpoint included), not torch's 10 or 30 minutes.

    Args:
        model: a layer, or a model that contains some.
        mesh: the ranks that share the experts. With two dimensions, nodes and ranks within a node, tokens are exchanged
            in two levels.
        chunks: parts into which a rank's tokens are split, so that one travels while another is being computed.
        tensor_parallel_mesh: ranks that split the inner width of each expert; they must be given the same tokens.

    Returns:
        `model`.

    Raises:
        InputError: there is no network of experts, or one that cannot be spread: its tokens look at their neighbours,
            its parameters do not begin with the experts, or the sizes do not fit the mesh.

    Examples:
        >>> mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        >>> model = parallelize_experts(model, mesh["ep"], chunks=2)
    """
    if chunks < 1:
        raise InputError(f"parallelize_experts: chunks must be 1 or more; got {chunks}")
    if mesh.ndim not in (1, 2):
        raise InputError(f"parallelize_experts: the mesh must have one dimension, or two; got {mesh}")
    groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    width = None if tensor_parallel_mesh is None else tensor_parallel_mesh.get_group()
    layout = _Layout(groups, chunks, width)
    networks = [module for module in model.modules() if isinstance(module, ExpertNetwork)]
    if not networks:
        raise InputError(f"parallelize_experts: {type(model).__name__} contains no ExpertNetwork")
    whole = mesh if tensor_parallel_mesh is None else _joined(mesh, tensor_parallel_mesh)
    # All is checked before anything changes.
    splits = [_placements(network, groups, mesh, tensor_parallel_mesh) for network in networks]
    for network, placements in zip(networks, splits, strict=True):
        for path, parameter in list(network.named_parameters()):
            at, _, name = path.rpartition(".")
            local = distribute_tensor(parameter.detach(), whole, placements[path], src_data_rank=None)
            here = nn.Parameter(local, requires_grad=parameter.requires_grad)
            network.get_submodule(at)._parameters[name] = here
        if tensor_parallel_mesh is not None:
            network.register_state_dict_post_hook(one_piece)  # type: ignore[no-untyped-call]
        network.__class__ = mixed(Parallel, type(network))
        network._layout = layout  # type: ignore[assignment]
    return model


class Parallel(Mixed):
    """What a network does otherwise that `parallelize_experts` has spread."""

    _layout: _Layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes of exchanges are read on the host
    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`, by the ranks that have the experts."""
        network: Any = self
        layout = self._layout
        experts = partial(tensor_parallel.sum_of_parts, network.rows, layout.width)
        where: dict[str, Any] = {"groups": layout.groups, "chunks": layout.chunks}
        everywhere = partial(dispatch, experts=experts, num_experts=network.num_experts, **where)
        with _local_parameters(network, layout.width):
            return routing.apply(x, everywhere).to(x.dtype)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        sizes = " x ".join(str(group.size()) for group in self._layout.groups)
        return f"{super().extra_repr()}, expert_parallel={sizes}"  # type: ignore[misc]


def _placements(
    network: ExpertNetwork, groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh, width: DeviceMesh | None
) -> dict[str, list[Placement]]:
    name = type(network).__name__
    if isinstance(network, Parallel):
        raise InputError(f"parallelize_experts: {name} has been spread before")
    if network.needs_sequences:
        raise InputError(
            f"parallelize_experts: the experts of {name} look at a token's neighbours, which may be on another rank; "
            "spread networks that take each token by itself (FeedForwardExpert), and keep this one whole"
        )
    if not hasattr(network, "rows"):
        raise InputError(
            f"parallelize_experts: {name} has no method rows(x, index, weights), which computes rows by the experts of "
            "one rank: give it one, as FeedForwardExpert has, or keep it whole"
        )
    held = [network.num_experts]
    for group in groups:
        held = [count for experts in held for count in experts_per_rank(experts, group.size())]
    columns = {} if width is None else tensor_parallel.placements(network, width.size())
    splits: dict[str, list[Placement]] = {}
    for parameter_name, parameter in network.named_parameters():
        if parameter.dim() == 0 or parameter.shape[0] != network.num_experts:
            raise InputError(
                f"parallelize_experts: {name}.{parameter_name} must begin with {network.num_experts} experts to be "
                f"split by them; got {list(parameter.shape)}: what all experts share can't be split, so keep this "
                "network whole"
            )
        splits[parameter_name] = [Shard(0)] * mesh.ndim
        if width is not None:
            splits[parameter_name].append(columns[parameter_name])
    return splits


def _joined(mesh: DeviceMesh, width: DeviceMesh) -> DeviceMesh:
    """The mesh of experts by inner width, both of which were cut from one mesh."""
    if mesh.ndim != 1:
        raise InputError("parallelize_experts: with tensor_parallel_mesh the mesh of the experts has one dimension")
    root = mesh._get_root_mesh()
    if root != width._get_root_mesh() or not mesh.mesh_dim_names or not width.mesh_dim_names:
        raise InputError(
            "parallelize_experts: mesh and tensor_parallel_mesh must be named dimensions of one mesh: "
            'mesh = init_device_mesh(..., mesh_dim_names=("ep", "tp")), then mesh["ep"] and mesh["tp"]'
        )
    return root[(*mesh.mesh_dim_names, *width.mesh_dim_names)]


@contextmanager
def _local_parameters(network: nn.Module, width: dist.ProcessGroup | None) -> Iterator[None]:
    """Let the network see its own experts alone, as plain tensors; their gradients reach the DTensors."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in network.modules():
        own: dict[str, Any] = module._parameters
        before += [(own, name, parameter) for name, parameter in own.items() if isinstance(parameter, DTensor)]
    try:
        for parameters, name, parameter in before:
            local = parameter.to_local()
            if width is not None and name == "down_proj_bias":
                local = tensor_parallel.partial_bias(local, width)
            parameters[name] = local
        yield
    finally:
        for parameters, name, parameter in before:
            parameters[name] = parameter
