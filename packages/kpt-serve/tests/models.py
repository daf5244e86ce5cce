"""Small models that are written as packages."""

from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = 64


class Own(nn.Module):
    """A layer of ours: two inputs, two results, a tied weight, a buffer that is not saved, a number that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.tied = self.up
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.alias = nn.Parameter(self.down.weight.detach())  # another parameter of the same memory
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> dict[str, Tensor]:
        y = nn.functional.linear(torch.relu(self.tied(x)), self.alias) + self.down(torch.relu(self.up(x)))
        return {"y": y * self.scale**power * mask[..., None], "kept": mask.sum()}


def both(*names: str) -> dict[str, dict[int, Any]]:
    """Return the ranges of inputs whose first two dimensions are dynamic, and equal in all of them."""
    return {name: {0: ("batch", 1, 64), 1: ("length", 1, 512)} for name in names}


def own() -> tuple[nn.Module, Any, Any]:
    inputs = {"x": torch.randn(3, 5, HIDDEN), "mask": torch.randint(2, (3, 5)), "power": 2}
    return Own(), inputs, both("x", "mask")


def moe() -> tuple[nn.Module, Any, Any]:
    from kpt_moe.layers import MoEConfig, MoELayer

    return MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=4)), torch.randn(3, 5, HIDDEN), both("x")


def fp8() -> tuple[nn.Module, Any, Any]:
    import kpt_fp8

    model = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))
    return kpt_fp8.convert_model_to_fp8(model, min_features=1), torch.randn(3, 5, HIDDEN), both("input")


def attention() -> tuple[nn.Module, Any, Any]:
    from kpt_attention import Attention

    return Attention(HIDDEN, 4, causal=True), torch.randn(3, 5, HIDDEN), both("x")
