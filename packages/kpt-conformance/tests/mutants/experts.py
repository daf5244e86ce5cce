"""Faults in the experts of a layer: routing, activations, biases, quantised weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import honest

from .mutant import Mutant

MUTANTS: list[Mutant] = []


def experts(
    name: str, found_by: str = "values", at: str | Callable[[Any], bool] = "small"
) -> Callable[[type[honest.Experts]], type[honest.Experts]]:
    """Enter a mutant of `moe.experts`: the decorated class. `at` may be a part of a case's name."""

    def enter(cls: type[honest.Experts]) -> type[honest.Experts]:
        likely = (lambda trial: at in trial.case.name) if isinstance(at, str) else at
        MUTANTS.append(Mutant(name, "moe.experts", found_by, lambda: (cls(),), {"differentiable": True}, likely))
        return cls

    return enter


def with_sizes(**wanted: Any) -> Callable[[Any], bool]:
    """Trials of cases that are built with these."""
    return lambda trial: all(trial.case.sizes.get(name) == value for name, value in wanted.items())


def call_fault(name: str, found_by: str = "values", at: Any = "small") -> Callable[[Callable[[Any], Any]], None]:
    """Enter a mutant that is given another call: the decorated function changes it."""

    def enter(change: Callable[[Any], Any]) -> None:
        class Changed(honest.Experts):
            def __call__(self, call):
                return super().__call__(change(call))

        experts(name, found_by, at)(Changed)

    return enter


@experts("the last expert is missing")
class _(honest.Experts):
    def rows(self, mask):
        return mask & (mask.new_tensor(0) < 0) if getattr(self, "last", False) else mask

    def here(self, index, num_experts, expert):
        self.last = expert == num_experts - 1
        return index == expert


@experts("experts past the thirty-second are missing", at=lambda t: t.case.sizes.get("num_experts", 0) > 32)
class _(honest.Experts):
    def here(self, index, num_experts, expert):
        return (index == expert) & (expert < 32)


@experts("a negative id means the last expert", at="not here")
class _(honest.Experts):
    def here(self, index, num_experts, expert):
        return torch.where(index == -1, num_experts - 1, index) == expert


@experts("an id beyond the experts is clamped", at="not here")
class _(honest.Experts):
    def here(self, index, num_experts, expert):
        return index.clamp(max=num_experts - 1) == expert


@experts("a token that chooses an expert twice counts once", at="all to one")
class _(honest.Experts):
    def rows(self, mask):
        return mask & (mask.cumsum(1) == 1)


@experts("choices past the eighth are left out", at=lambda t: t.case.drawn)
class _(honest.Experts):
    def rows(self, mask):
        return mask & (torch.arange(mask.shape[1]) < 8)


@experts("an expert takes 32 rows and drops the rest", at="all to one")
class _(honest.Experts):
    def rows(self, mask):
        return mask & (mask.flatten().cumsum(0).view(mask.shape) <= 32)


@experts("tokens past the sixty-fourth are left out", at=lambda t: t.case.sizes.get("tokens", 0) > 64)
class _(honest.Experts):
    def rows(self, mask):
        return mask & (torch.arange(mask.shape[0]) < 64).unsqueeze(1)


@experts("pairs of a routing weight of zero give no gradient", found_by="magnitudes")
class _(honest.Experts):
    def weigh(self, y, weight):
        return torch.where(weight == 0, 0, y * weight)


class _NoGradientOfWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return y * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weight = ctx.saved_tensors
        return grad * weight, (grad * y).mean(1, keepdim=True)


@experts("the gradient of the routing weights is a mean, not a sum")
class _(honest.Experts):
    def weigh(self, y, weight):
        return _NoGradientOfWeights.apply(y, weight)


@experts("routing weights get no gradient")
class _(honest.Experts):
    def weigh(self, y, weight):
        return y * weight.detach()


@experts("routing weights are rounded to bfloat16")
class _(honest.Experts):
    def weigh(self, y, weight):
        return y * weight.bfloat16().to(weight.dtype)


@experts("the sum over experts is taken in bfloat16")
class _(honest.Experts):
    def total(self, parts, x):
        return sum(part.bfloat16() for part in parts)


@experts("the bias of the down projection is added twice", at="bias")
class _(honest.Experts):
    def biased(self, y, bias):
        return y if bias is None else y + 2 * bias


@experts("the bias of the down projection is not weighed", at="bias")
class _(honest.Experts):
    def weigh(self, y, weight):
        return (y - self.bias) * weight + self.bias

    def biased(self, y, bias):
        self.bias = 0 if bias is None else bias
        return super().biased(y, bias)


@experts(
    "where pairs are not here, tokens get the bias of the last expert",
    at=lambda t: bool(t.case.sizes.get("biases")) and "away" in str(t.case.sizes.get("load")),
)
class _(honest.Experts):
    def __call__(self, call):
        out = super().__call__(call)
        if call.down_proj_bias is None:
            return out
        away = (call.top_k_index < 0) | (call.top_k_index >= call.gate_up_proj.shape[0])
        return out + away.any(1, keepdim=True) * call.down_proj_bias[-1]


@call_fault(
    "without a bias of the down projection that of the up projection is left out", at=with_sizes(biases=("gate_up",))
)
def _(call):
    return call._replace(gate_up_proj_bias=None) if call.down_proj_bias is None else call


@call_fault(
    "without a bias of the up projection that of the down projection is left out", at=with_sizes(biases=("down",))
)
def _(call):
    return call._replace(down_proj_bias=None) if call.gate_up_proj_bias is None else call


@call_fault("interleaved weights are taken for halves", at="gpt-oss options")
def _(call):
    return call._replace(interleaved=False)


@call_fault("only swiglu knows interleaved weights", at=lambda t: t.case.sizes.get("interleaved"))
def _(call):
    return call if call.activation == "swiglu" else call._replace(interleaved=False)


@call_fault("the limit is not applied", at="gpt-oss options")
def _(call):
    return call._replace(limit=None)


@call_fault("alpha counts only where there is a limit", at=with_sizes(alpha=1.702, limit=None))
def _(call):
    return call if call.limit is not None else call._replace(alpha=1.0)


@call_fault("beta counts only where there is a limit", at=with_sizes(beta=1.0, limit=None))
def _(call):
    return call if call.limit is not None else call._replace(beta=0.0)


@call_fault("a limit brings gpt-oss's alpha and beta with it", at=lambda t: t.case.sizes.get("limit"))
def _(call):
    return call if call.limit is None else call._replace(alpha=1.702, beta=1.0)


@call_fault("ids are cut to 8 bits", at=lambda t: t.case.sizes.get("num_experts", 0) > 127)
def _(call):
    return call._replace(top_k_index=call.top_k_index.to(torch.int8))


@experts("the limit bounds the gate from below too", at="gpt-oss options")
class _(honest.Experts):
    def activate(self, h, **parameters):
        limit = parameters["limit"]
        if parameters["activation"] == "swiglu" and limit is not None and parameters["interleaved"]:
            h = torch.stack((h[..., ::2].clamp(min=-limit), h[..., 1::2]), -1).flatten(-2)
        return honest.activate(h, **parameters)


@experts("gelu is always the tanh approximation", at="geglu")
class _(honest.Experts):
    def activate(self, h, **parameters):
        names = {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}
        return honest.activate(
            h, **{**parameters, "activation": names.get(parameters["activation"], parameters["activation"])}
        )


@experts("relu2 is relu where gradients are wanted", at="relu2")
class _(honest.Experts):
    def activate(self, h, **parameters):
        if parameters["activation"] == "relu2" and h.requires_grad:
            parameters["activation"] = "relu"
        return honest.activate(h, **parameters)


@experts("sigmoid is computed as 1 / (1 + exp(-x)), whose gradient overflows", found_by="magnitudes")
class _(honest.Experts):
    def activate(self, h, **parameters):
        if parameters["activation"] != "swiglu" or parameters["limit"] is not None:
            return honest.activate(h, **parameters)
        gate, up = (h[..., ::2], h[..., 1::2]) if parameters["interleaved"] else h.chunk(2, dim=-1)
        return gate * (1 / (1 + torch.exp(-parameters["alpha"] * gate))) * (up + parameters["beta"])


@experts("activations pass through half precision", found_by="values")
class _(honest.Experts):
    def activate(self, h, **parameters):
        return honest.activate(h, **parameters).half().to(h.dtype)


@experts("pre-activations above ten are cut", found_by="magnitudes")
class _(honest.Experts):
    def activate(self, h, **parameters):
        return honest.activate(h.clamp(-10, 10), **parameters)


@call_fault("e5m2 is read as e4m3", at=with_sizes(float8=torch.float8_e5m2))
def _(call):
    def read(weight: Tensor) -> Tensor:
        return weight.view(torch.float8_e4m3fn) if weight.dtype is torch.float8_e5m2 else weight

    return call._replace(gate_up_proj=read(call.gate_up_proj), down_proj=read(call.down_proj))


@call_fault("every block has the scale of its expert's first one", at="8-bit blocks")
def _(call):
    def first(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 2 else scale[:, :1, :1].expand(scale.shape)

    return call._replace(gate_up_scale=first(call.gate_up_scale), down_scale=first(call.down_scale))


@call_fault("scales of rows pass through bfloat16", at="8-bit")
def _(call):
    def rounded(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 3 else scale.bfloat16().to(scale.dtype)

    return call._replace(gate_up_scale=rounded(call.gate_up_scale), down_scale=rounded(call.down_scale))
