"""Root mean square norm: op `norm.rms`, and `serve_norms`, which lets a model's norms compute by it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import Call, InputError, Kernel, op
from kpt_core.policy import next_power_of_two

from .rewrite import check_model

_NAME = "norm.rms"
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _check(call: Call) -> None:
    x, weight = call.x, call.weight
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0] or weight.shape[0] == 0:
        raise InputError(
            f"{_NAME}: x must be [..., N] and weight [N] with equal N of at least 1; got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if x.dtype not in _FLOATING or weight.dtype is not x.dtype:
        raise InputError(f"{_NAME}: both must have one floating dtype; got {x.dtype} and {weight.dtype}: convert them")
    if not call.eps >= 0:
        raise InputError(f"{_NAME}: eps must be at least 0; got {call.eps}")


def _fake(call: Call) -> Tensor:
    return call.x.new_empty(call.x.shape)  # type: ignore[no-any-return]


def _flops(call: Call) -> int:
    return 4 * call.x.numel()  # type: ignore[no-any-return]


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Rows, rounded since they vary from call to call, and N."""
    return next_power_of_two(call.x.numel() // call.x.shape[-1]), call.x.shape[-1]


@op(_NAME, check=_check, fake=_fake, flops=_flops, size_key=_size_key)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute `x / sqrt(mean(x**2) + eps) * weight` over the last dimension, in float32 at least, and round once.

    Args:
        x: `[..., N]` float64, float32, bfloat16 or float16.
        weight: `[N]` of `x`'s dtype.
        eps: added to the mean square.

    Returns:
        `[..., N]` of `x`'s dtype.

    Raises:
        InputError: a shape, dtype or number does not fit.

    Source: arXiv:1910.07467.
    """
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    values = x.to(wide)
    return (values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)).to(x.dtype)


def forward(call: Call) -> Tensor:
    """Compute by torch's own norm."""
    return F.rms_norm(call.x, (call.x.shape[-1],), call.weight, call.eps)


OPS = (rms_norm, Kernel(_NAME, forward=f"{__name__}:forward"))


class RMSNorm(nn.RMSNorm):
    """A norm that computes by op `norm.rms` on CPUs where no gradient is wanted, and is torch's own for all else."""

    _eps: float

    @classmethod
    def from_norm(cls, norm: nn.Module) -> "RMSNorm":
        """Return a twin that shares the weight.

        Raises:
            InputError: `norm` is no root mean square norm of one dimension with a weight alone.
        """
        eps = eps_of(norm)
        if eps is None:
            raise InputError(f"RMSNorm: {type(norm).__name__} computes something else than a root mean square norm")
        weight: Any = norm.weight
        made = cls(weight.shape[0], eps=eps, elementwise_affine=False)
        made.elementwise_affine, made.weight, made._eps = True, weight, eps
        return made.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x` `[..., N]`."""
        if x.is_cpu and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            weight: Any = self._parameters["weight"]
            if weight.dtype is x.dtype:
                return rms_norm(x, weight, eps=self._eps)
        return super().forward(x)


def eps_of(norm: nn.Module) -> float | None:
    """Return a root mean square norm's eps; None for modules that are none, have no weight on a CPU, or have hooks.

    A class says by its name that it is one, and by what it makes of a few numbers what it computes: Gemma's adds 1 to
    its weight.
    """
    if isinstance(norm, RMSNorm) or not type(norm).__name__.endswith("RMSNorm") or "forward" in vars(norm):
        return None
    if set(dict(norm.named_parameters())) != {"weight"} or list(norm.buffers()) or norm._forward_hooks:
        return None
    if norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return None
    if len(inspect.signature(norm.forward).parameters) != 1:
        return None
    weight: Any = norm.weight
    eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight.dim() != 1 or not weight.is_cpu or weight.dtype not in _FLOATING or not isinstance(eps, float):
        return None
    size = torch.tensor([[1e-3], [1.0], [30.0]])
    x = (torch.linspace(-1.0, 2.0, 3 * weight.shape[0]).view(3, -1).sin() * size).to(weight.dtype)
    try:
        with torch.no_grad():
            found, wanted = norm(x), rms_norm.run_reference(rms_norm.bind(x, weight, eps=eps))
    except Exception:  # foreign code, which may take other shapes alone, or a distributed weight
        return None
    bound = 8 * torch.finfo(x.dtype).eps
    same = type(found) is Tensor and found.dtype is x.dtype and torch.allclose(found, wanted, rtol=bound, atol=bound)
    return eps if same else None


def serve_norms(model: nn.Module) -> list[str]:
    """Let every root mean square norm of a model compute by `norm.rms`, in place; return their paths.

    transformers computes one by eight operations, each of which a step of decoding waits for. Results are rounded once,
    where most models round before they multiply by the weight. Weights and their names stay.

    Raises:
        InputError: `model` is no module.

    Examples:
        >>> model = nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64))
        >>> serve_norms(model)
        ['0']
    """
    check_model(model)
    found = {path: norm for path, norm in model.named_modules() if path and eps_of(norm) is not None}
    made = {norm: RMSNorm.from_norm(norm) for norm in found.values()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # `named_children` tells a child once
            if child in made:
                setattr(parent, name, made[child])
    return list(found)
