"""Calls of the kernels as the core makes them: a record, forward and backward, and autograd over both."""

from collections import namedtuple
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kpt_triton.moe import experts as of_experts
from kpt_triton.moe import gating
from kpt_triton.moe import grouped_mm as of_products
from kpt_triton.moe import grouped_mm_wgrad as of_wgrad
from kpt_triton.moe import scaled_grouped_mm as of_scaled_products

#: What a call has if nothing is given.
_DEFAULTS: dict[ModuleType, dict[str, Any]] = {
    of_experts: {
        "gate_up_proj_bias": None, "down_proj_bias": None, "activation": "swiglu", "transposed": False,
        "interleaved": False, "alpha": 1.0, "beta": 0.0, "limit": None, "gate_up_scale": None, "down_scale": None,
        "activations": "none",
    },
    of_scaled_products: {"x_scale": None, "out_dtype": None},
    gating: {
        "correction_bias": None, "score": "softmax", "renormalize": True, "scale": 1.0, "num_groups": 1,
        "top_groups": 1,
    },
}  # fmt: skip


def record(module: ModuleType, config: Mapping[str, str] | None = None, needs: tuple[str, ...] = (), **given: Any):
    """The record of a call; arguments in the op's order."""
    fields = {**given, **{k: v for k, v in _DEFAULTS.get(module, {}).items() if k not in given}}
    return namedtuple("Call", [*fields, "needs", "config"])(*fields.values(), needs, config)


def run(module: ModuleType, config: Mapping[str, str] | None = None, **given: Any) -> Any:
    """The results of a call, differentiable by the module's backward."""
    wanted = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad and torch.is_grad_enabled()}
    plain = {k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}
    return _Call.apply(module, record(module, config, tuple(wanted), **plain), *wanted.values())


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, call: Any, *wanted: Tensor) -> Any:
        found = module.forward(call)
        results, ctx.saved = found if module is of_experts else (found, found if module is gating else ())
        assert bool(ctx.saved) == (module is gating or (module is of_experts and bool(wanted)))
        ctx.set_materialize_grads(False)
        if module is gating:
            ctx.mark_non_differentiable(results[1])
        if module is of_scaled_products:  # of x nothing is kept but its shape
            call = call._replace(x=call.x.new_zeros(()).expand_as(call.x))
        ctx.module, ctx.call = module, call
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.module.backward(ctx.call, ctx.saved, *grads)
        assert found.keys() == set(ctx.call.needs)
        for name, grad in found.items():
            argument = getattr(ctx.call, name)
            assert (grad.shape, grad.dtype) == (argument.shape, argument.dtype), name
        return None, None, *(found[name] for name in ctx.call.needs)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, tile: str = "") -> Tensor:
    return run(of_products, {"tile": tile}, x=x, weight=weight, offsets=offsets)


def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor, tile: str = "") -> Tensor:
    return run(of_wgrad, {"tile": tile}, x=x, grad=grad, offsets=offsets)


def scaled_grouped_mm(
    x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, tile: str = "", **options: Any
) -> Tensor:
    return run(of_scaled_products, {"tile": tile}, x=x, weight=weight, scale=scale, offsets=offsets, **options)


def top_k_gating(logits: Tensor, correction_bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return run(gating, logits=logits, correction_bias=correction_bias, **options)


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, tiles: Mapping[str, str] | None = None, **options: Any
) -> Tensor:  # fmt: skip
    tensors = {"x": x, "top_k_index": index, "top_k_weights": weights, "gate_up_proj": up, "down_proj": down}
    return run(of_experts, tiles, **tensors, gate_up_proj_bias=up_bias, down_proj_bias=down_bias, **options)
