"""Experts spread over the ranks of a device mesh."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from kpt_core import InputError
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.routing import Routing

from . import tensor_parallel
from .checkpoint import save_contiguous_shards
from .dispatch import dispatch, experts_per_rank

_Model = TypeVar("_Model", bound=nn.Module)


class _ByRows(Protocol):
    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a network's experts are.

    Attributes:
        groups: the ranks that share the experts, outermost level first.
        chunks: as for `dispatch`.
        width: the ranks that split the experts' inner width, if any.
    """

    groups: tuple[dist.ProcessGroup, ...]
    chunks: int
    width: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Layout":
        # A copy of a network is spread over the same ranks; their groups cannot be copied.
        return self


def parallelize_experts(
    model: _Model,
    mesh: DeviceMesh,
    *,
    chunks: int = 1,
    hierarchical: bool | None = None,
    tensor_parallel_mesh: DeviceMesh | None = None,
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
        mesh: the ranks that share the experts. Two dimensions are nodes and ranks within a node.
        chunks: parts into which a rank's tokens are split, so that one travels while another is being computed.
        hierarchical: exchange tokens in two levels, between nodes and then within one. None does so if `mesh` has two
            dimensions; False uses one exchange among all ranks.
        tensor_parallel_mesh: ranks that split the inner width of each expert; they must be given the same tokens.

    Returns:
        `model`.

    Raises:
        InputError: there is no network of experts, or one that cannot be spread: its tokens look at their neighbours,
            its parameters do not begin with the experts, or the sizes do not fit the mesh.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        >>> model = parallelize_experts(model, mesh["ep"], chunks=2)
    """
    _require_mesh(mesh, hierarchical, chunks)
    if hierarchical is False and mesh.ndim == 2:
        mesh = mesh._flatten()
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
        _shard(network, whole, placements)
        if tensor_parallel_mesh is not None:
            save_contiguous_shards(network)
        network.__class__ = _parallel(type(network))
        network._layout = layout  # type: ignore[assignment]
    return model


def parallel_networks(model: nn.Module) -> list[ExpertNetwork]:
    """Those networks of experts in `model` that `parallelize_experts` has spread."""
    return [cast(ExpertNetwork, module) for module in model.modules() if isinstance(module, _Parallel)]


class _Parallel:
    """What a spread network does otherwise."""

    _layout: _Layout

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes of exchanges are read on the host
    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        network, layout = cast(ExpertNetwork, self), self._layout

        def experts(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if layout.width is None:
                return cast(_ByRows, network).rows(x, index, weights)
            x, weights = tensor_parallel.enter(layout.width, x, weights)
            return tensor_parallel.leave(layout.width, cast(_ByRows, network).rows(x, index, weights))

        def everywhere(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return dispatch(
                x,
                index,
                weights,
                experts,
                num_experts=network.num_experts,
                groups=layout.groups,
                chunks=layout.chunks,
            )

        with _local_parameters(network, layout.width):
            return routing.apply(x, everywhere).to(x.dtype)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        sizes = " x ".join(str(group.size()) for group in self._layout.groups)
        return f"{super().extra_repr()}, expert_parallel={sizes}"  # type: ignore[misc]


@functools.cache
def _parallel(kind: type[ExpertNetwork]) -> type[ExpertNetwork]:
    """The spread kind of a kind of network."""
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(f"Parallel{kind.__name__}", (_Parallel, kind), namespace)


def _require_mesh(mesh: DeviceMesh, hierarchical: bool | None, chunks: int) -> None:
    if chunks < 1:
        raise InputError(f"parallelize_experts: chunks must be 1 or more; got {chunks}")
    if mesh.ndim not in (1, 2) or (hierarchical and mesh.ndim != 2):
        wanted = "two dimensions, nodes and ranks within one" if hierarchical else "one dimension, or two"
        raise InputError(f"parallelize_experts: the mesh must have {wanted}; got {mesh}")


def _placements(
    network: ExpertNetwork, groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh, width: DeviceMesh | None
) -> dict[str, list[Placement]]:
    """How each parameter is split, by its name."""
    name = type(network).__name__
    if isinstance(network, _Parallel):
        raise InputError(f"parallelize_experts: {name} has been spread before")
    if network.needs_sequences or not hasattr(network, "rows"):
        raise InputError(
            f"parallelize_experts: the experts of {name} look at a token's neighbours, which may be on another rank; "
            "spread networks that take each token by itself (FeedForwardExpert), and keep this one whole"
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
                f"split by them; got {list(parameter.shape)}"
            )
        splits[parameter_name] = [Shard(0)] * mesh.ndim
        if width is not None:
            splits[parameter_name].append(columns[parameter_name])
    return splits


def _shard(network: ExpertNetwork, mesh: DeviceMesh, placements: dict[str, list[Placement]]) -> None:
    for full_name, parameter in list(network.named_parameters()):
        module_name, _, name = full_name.rpartition(".")
        local = distribute_tensor(parameter.detach(), mesh, placements[full_name], src_data_rank=None)
        module = network.get_submodule(module_name)
        module._parameters[name] = nn.Parameter(local, requires_grad=parameter.requires_grad)


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
