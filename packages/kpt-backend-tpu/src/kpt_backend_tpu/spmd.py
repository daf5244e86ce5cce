"""Spread experts and heads of attention over a mesh of devices, by torch_xla's SPMD.

XLA can't divide a Pallas kernel: left to itself it gathers the operands, and each device computes everything. So each
device is given its part by hand (torch_xla's manual sharding), where the kernel runs as on one device, and XLA sums or
joins what the parts give.
"""

import copy
import dataclasses
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import kpt_core
from kpt_core import InputError

from .backend import BACKEND

#: For each dimension of a tensor the axis of the mesh that it is divided over, or None.
Spec = tuple[str | None, ...]
Module = TypeVar("Module", bound=nn.Module)


class _Enter(torch.autograd.Function):
    """Give each device its part of a tensor; of what is not divided, all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec, mesh: Any, axis: str) -> Tensor:
        from torch_xla.distributed.spmd import enable_manual_sharding

        ctx.spec, ctx.shape, ctx.mesh, ctx.axis = spec, x.shape, mesh, axis
        part: Tensor = enable_manual_sharding(x, spec, mesh=mesh).global_tensor
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if any(ctx.spec):
            found = _joined(grad, ctx.spec, ctx.shape, ctx.mesh)
        else:  # every device has used it
            found = _summed(grad, ctx.mesh, ctx.axis)
        return found, None, None, None


class _Join(torch.autograd.Function):
    """Take the devices' parts for one tensor again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec, shape: torch.Size, mesh: Any) -> Tensor:
        ctx.spec, ctx.mesh = spec, mesh
        return _joined(x, spec, shape, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torch_xla.distributed.spmd import enable_manual_sharding

        return enable_manual_sharding(grad, ctx.spec, mesh=ctx.mesh).global_tensor, None, None, None


def _joined(x: Tensor, spec: Spec, shape: torch.Size, mesh: Any) -> Tensor:
    from torch_xla.distributed.spmd import disable_manual_sharding

    # A copy, since torch_xla notes what it does on the tensor itself.
    whole: Tensor = disable_manual_sharding(x.clone(), spec, shape, mesh=mesh).global_tensor
    return whole


def _summed(grad: Tensor, mesh: Any, axis: str) -> Tensor:
    spec = (axis, *(None,) * grad.dim())
    return _joined(grad[None], spec, torch.Size((mesh.size(), *grad.shape)), mesh).sum(0)


def shard_experts(layer: Module, mesh: Any, axis: str = "model") -> Module:
    """Give each device of a mesh its share of a layer's experts: its memory, and the work of the tokens sent to them.

    Every device sees all tokens; pairs of a token and an expert that lies elsewhere cost it nothing. What the devices
    give is summed. Parameters and their gradients are divided by experts, so make the optimiser afterwards.

    Args:
        layer: a layer of `kpt_moe` whose `experts` are feed-forward, or these experts; on `xla`, changed in place.
        mesh: `torch_xla.distributed.spmd.Mesh` of one axis, after `torch_xla.runtime.use_spmd()`.
        axis: its name.

    Returns:
        The layer.

    Raises:
        InputError: no such mesh, experts of another kind, on another device, that don't divide by the devices, or are
            sharded already.
    """
    devices = _devices(mesh, axis, "shard_experts")
    experts: Any = getattr(layer, "experts", layer)
    name = type(experts).__name__
    if not hasattr(type(experts), "rows") or "rows" in vars(experts):
        told = "are sharded already" if "rows" in vars(experts) else "have no rows(x, index, weights)"
        raise InputError(f"shard_experts: experts must be feed-forward ones of kpt_moe, once; {name} {told}")
    parameters = dict(experts.named_parameters(recurse=False))
    if any(value.device.type != "xla" for value in parameters.values()):
        raise InputError(f"shard_experts: experts must be on xla; got {next(iter(parameters.values())).device}")
    if experts.num_experts % devices:
        raise InputError(f"shard_experts: {experts.num_experts} experts do not divide by {devices} devices")
    from torch_xla.distributed.spmd import mark_sharding

    specs = {key: (axis, *(None,) * (value.dim() - 1)) for key, value in parameters.items()}
    for key, value in parameters.items():
        mark_sharding(value, mesh, specs[key])
    share = experts.num_experts // devices
    firsts = torch.arange(0, experts.num_experts, share).to(next(iter(parameters.values())).device)

    def rows(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        def whole(tensor: Tensor) -> Tensor:
            return _entered(tensor, (None,) * tensor.dim(), mesh, axis)

        part = copy.copy(self)
        mine = {key: _entered(self._parameters[key], spec, mesh, axis) for key, spec in specs.items()}
        part.__dict__["_parameters"] = self._parameters | mine
        here = whole(index) - _entered(firsts, (axis,), mesh, axis)  # others' experts are out of range, and left out
        with kpt_core.use(BACKEND.name, op="moe.experts"):  # XLA aborts the process where plain torch is divided so
            out = type(self).rows(part, whole(x), here, whole(weights))
        joined = _left(out[None], (axis, None, None), torch.Size((devices, *x.shape)), mesh)
        return joined.sum(0).to(x.dtype)

    experts.rows = MethodType(rows, experts)
    return layer


def shard_attention(attention: Callable[..., Any], mesh: Any, axis: str = "model") -> Callable[..., Any]:
    """Return an attention that gives each device of a mesh its share of the heads.

    Args:
        attention: `kpt_attention.attention`.
        mesh: `torch_xla.distributed.spmd.Mesh` of one axis, after `torch_xla.runtime.use_spmd()`.
        axis: its name.

    Returns:
        A function of q `[B, Hq, Q, D]`, k `[B, Hkv, K, D]`, v `[B, Hkv, K, Dv]`, a plan or None, and attention's
        keywords; tensors are on `xla`, and the output is divided by heads. It raises `InputError` where heads don't
        divide by the devices, for a mask without a plan, and for tensors among the keywords, as sinks are.

    Raises:
        InputError: no such mesh.
    """
    devices = _devices(mesh, axis, "shard_attention")

    def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any) -> Any:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or x.shape[1] % devices or x.device.type != "xla":
                raise InputError(
                    f"shard_attention: {name} must be [batch, heads, rows, head_dim] on xla, its heads divisible by "
                    f"{devices} devices; got {list(x.shape)} on {x.device}"
                )
        if mask is not None and not hasattr(mask, "block_bits"):
            raise InputError("shard_attention: a mask must be planned once on the host: mask.plan(...).to('xla')")
        for name, value in options.items():
            if isinstance(value, Tensor):  # torch_xla 2.9 aborts the process in the backward of sinks
                raise InputError(f"shard_attention: {name} can't be divided by heads; leave it out, or use one device")
        parts = [_entered(x, (None, axis, None, None), mesh, axis) for x in (q, k, v)]
        with kpt_core.use(BACKEND.name, op="attention.dense"):
            out = attention(*parts, None if mask is None else _plan_by_heads(mask, mesh, axis), **options)
        found, *more = out if isinstance(out, tuple) else (out,)
        whole = torch.Size((*q.shape[:3], v.shape[3]))
        found = _left(found, (None, axis, None, None), whole, mesh)
        if not more:
            return found
        return found, _left(more[0], (None, axis, None), q.shape[:3], mesh)

    return by_heads


def _plan_by_heads(plan: Any, mesh: Any, axis: str) -> Any:
    """Return a plan of which each device has its own heads', where they differ."""
    changed = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Tensor):
            own = field.name != "block_bits" and value.shape[1] > 1
            spec = (None, axis, *(None,) * (value.dim() - 2)) if own else (None,) * value.dim()
            changed[field.name] = _entered(value, spec, mesh, axis)
    return dataclasses.replace(plan, **changed)


def _entered(x: Tensor, spec: Spec, mesh: Any, axis: str) -> Tensor:
    part: Tensor = _Enter.apply(x, spec, mesh, axis)  # type: ignore[no-untyped-call]
    return part


def _left(x: Tensor, spec: Spec, shape: torch.Size, mesh: Any) -> Tensor:
    whole: Tensor = _Join.apply(x, spec, shape, mesh)  # type: ignore[no-untyped-call]
    return whole


def _devices(mesh: Any, axis: str, owner: str) -> int:
    """Return how many devices a mesh has, or raise `InputError` where it can't serve."""
    reason = BACKEND.why_no_device()
    if reason is not None:
        raise InputError(f"{owner}: needs torch_xla: {reason}")
    from torch_xla import runtime
    from torch_xla.distributed.spmd import Mesh

    if not isinstance(mesh, Mesh) or mesh.axis_names != (axis,):
        got = getattr(mesh, "axis_names", mesh)
        raise InputError(f"{owner}: mesh must be a torch_xla.distributed.spmd.Mesh of one axis, {axis!r}; got {got!r}")
    if not runtime.is_spmd():
        raise InputError(f"{owner}: call torch_xla.runtime.use_spmd() first, before any tensor is on xla")
    return int(mesh.size())
