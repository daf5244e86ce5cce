"""The gate of the benchmark: no figure without a result that is as near to float64 as plain PyTorch's."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .loads import Problem

_MEAN, _LARGEST = 1.1, 2.0


@dataclass(slots=True)
class _Errors:
    """What is known so far of a tensor's distance to the truth, for each of those who computed it."""

    names: tuple[str, ...]
    total: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    scale: float = 0.0
    count: int = 0

    def meet(self, truth: Tensor, *got: Tensor) -> None:
        """Compare one more piece."""
        self.scale = max(self.scale, truth.abs().max().item()) if truth.numel() else self.scale
        self.count += truth.numel()
        for name, tensor in zip(self.names, got, strict=True):
            error = (tensor.detach().double() - truth).abs()
            self.total[name] = self.total.get(name, 0.0) + error.sum().item()
            worst = error.max().item() if error.numel() else 0.0
            self.largest[name] = worst if worst != worst else max(self.largest.get(name, 0.0), worst)


def activate(h: Tensor, *, gated: bool, gpt_oss: bool) -> Tensor:
    """The activation of a pre-activation, as its model's paper or code writes it."""
    if gpt_oss:
        gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if gated:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(h)


def faults(problem: Problem, got: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[list[str], dict[str, float]]:
    """What is further from float64 than it may be.

    Args:
        problem: the tensors.
        got: `result`, and the gradients by the names of `Problem.leaves` for those that are to be compared.
        plain: what KPT gave in plain PyTorch in the same dtype.

    Returns:
        A sentence for each tensor that is wrong, and the ratio of the mean errors of each tensor.
    """
    errors = {name: _Errors(("kpt", "plain")) for name in got}
    with_gradients = len(got) > 1
    shape, transposed = problem.load.shape, problem.load.gpt_oss
    x, weights, pull = (tensor.detach().double() for tensor in (problem.x, problem.weights, problem.grad))
    out, grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for expert in range(shape.num_experts):
        token, choice = torch.where(problem.index == expert)
        own = {name: t[expert].detach().double() for name, t in problem.leaves.items() if name not in ("x", "weights")}
        leaves = {**own, "x": x[token], "weights": weights[token, choice]}
        if with_gradients:
            for leaf in leaves.values():
                leaf.requires_grad_()
        up, down = (leaves[name] if transposed else leaves[name].mT for name in ("up", "down"))
        h = leaves["x"] @ up + leaves.get("up_bias", 0.0)
        y = activate(h, gated=shape.gated, gpt_oss=problem.load.gpt_oss) @ down + leaves.get("down_bias", 0.0)
        y = y * leaves["weights"][:, None]
        out.index_add_(0, token, y.detach())
        if with_gradients:
            found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), pull[token]), strict=True))
            grad_x.index_add_(0, token, found["x"])
            grad_weights[token, choice] = found["weights"]
            for name in own:
                errors[name].meet(found[name], got[name][expert], plain[name][expert])
    whole = {"result": out, "x": grad_x, "weights": grad_weights}
    for name, truth in whole.items():
        if name in got:
            errors[name].meet(truth, got[name], plain[name])
    said = [text for name, found in errors.items() if (text := _fault(name, found, got[name].dtype))]
    return said, {name: _ratio(found) for name, found in errors.items()}


def _fault(name: str, errors: _Errors, dtype: torch.dtype) -> str | None:
    # Where plain PyTorch happens to hit what is right, half a unit in the last place of float32 is still no fault.
    floor = torch.finfo(torch.float32).eps * errors.scale
    mean, plain = (errors.total[who] / max(errors.count, 1) for who in errors.names)
    largest, allowed = (errors.largest[who] for who in errors.names)
    if mean <= _MEAN * plain + floor and largest <= _LARGEST * allowed + floor:
        return None
    what = name if name == "result" else f"gradient of {name}"
    return (
        f"{what} in {dtype}: error {mean:.2e} on average and {largest:.2e} at most; plain PyTorch's own is "
        f"{plain:.2e} and {allowed:.2e}"
    )


def _ratio(errors: _Errors) -> float:
    return errors.total["kpt"] / max(errors.total["plain"], 1e-300)
