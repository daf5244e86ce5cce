"""What a dense feed-forward block of a model computes."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.activations import GATED, PLAIN, Activation

#: What the projections are called: those that together give the pre-activation, and the one after the activation.
_NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
#: Sizes of the block in miniature that is asked what it computes.
_HIDDEN, _INNER = 8, 6


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """The projections of a dense feed-forward block, and what happens between them."""

    up: tuple[str, ...]  # names of the linear modules that give gate and up, or both, or the plain pre-activation
    down: str  # name of the linear module that comes last
    activation: str
    hidden_size: int
    intermediate_size: int
    bias: bool  # of all projections

    @classmethod
    def of(cls, block: nn.Module) -> "DenseBlock":
        """Read a block; what it computes is asked of a twin in miniature, since its class does not say.

        Raises `InputError` for one that is not known, with the reason.
        """
        names, owner = projections(block), type(block).__name__
        linears: list[Any] = [] if names is None else [block.get_submodule(name) for name in (*names[0], names[1])]
        if "forward" in vars(block):
            raise InputError(f"{owner}: its forward was replaced (by hooks of accelerate?): remove that first")
        own = {parameter for linear in linears for parameter in linear.parameters()}
        if names is None or own != {*block.parameters(), *block.buffers()}:
            raise InputError(
                f"{owner}: is no dense feed-forward block of known projections (gate_proj, up_proj and down_proj; "
                "gate_up_proj and down_proj; up_proj and down_proj; fc1 and fc2; ...) and nothing else; it holds "
                f"{sorted(name for name, _ in block.named_children())}"
            )
        hidden, inner = linears[-1].weight.shape
        biases = {linear.bias is not None for linear in linears}
        trained = {weight.requires_grad for weight in block.parameters()}
        if len(biases) > 1 or len(trained) > 1:
            what = "have a bias" if len(biases) > 1 else "require gradients"
            raise InputError(f"{owner}: some of its projections {what} and others don't, but gate and up become one")
        gated = sum(linear.out_features for linear in linears[:-1]) == 2 * inner
        return cls(*names, _activation(block, *names, gated=gated), hidden, inner, biases == {True})

    def tensors(self, block: nn.Module) -> dict[str, Tensor]:
        """The weights and biases by their names in `FeedForwardExpert`."""
        found = {}
        for ours, names in (("gate_up_proj", self.up), ("down_proj", (self.down,))):
            linears = [block.get_submodule(name) for name in names]
            found[ours] = torch.cat([linear.get_parameter("weight") for linear in linears])
            if self.bias:
                found[f"{ours}_bias"] = torch.cat([linear.get_parameter("bias") for linear in linears])
        return found


def projections(block: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """The names of a dense feed-forward block's linear modules, up and down; None if they are called otherwise."""
    linears = {name for name, child in block.named_children() if type(child) is nn.Linear}
    return next(((up, down) for up, down in _NAMES if linears == {*up, down}), None)


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """A deep copy that users' hooks know nothing of."""
    made = copy.deepcopy(module)
    for part in made.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return made


def _activation(block: nn.Module, up: tuple[str, ...], down: str, *, gated: bool) -> str:
    """Which of our activations the block applies, in training as outside of it."""
    twin = copy.copy(block)
    width = (2 if gated else 1) * _INNER
    sizes = {**dict.fromkeys(up, (_HIDDEN, width // len(up))), down: (_INNER, _HIDDEN)}
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = {name: nn.Linear(*size, bias=False, device="cpu", dtype=torch.float64) for name, size in sizes.items()}
        for linear in small.values():
            linear.weight.normal_(std=0.5, generator=generator)
        rest = {name: child for name, child in block.named_children() if name not in small}
        twin._modules = {**{name: copy_without_hooks(child) for name, child in rest.items()}, **small}
        x = 2 * torch.randn(32, _HIDDEN, dtype=torch.float64, device="cpu", generator=generator)
        h = torch.cat([small[name](x) for name in up], dim=-1)
        have = []
        for training in (False, True):
            try:
                # Not a call of the module, which would run the hooks of the block.
                have.append(twin.train(training).forward(x))
            except Exception as error:
                raise InputError(f"{type(block).__name__}: can't be asked what it computes: {error}") from error
        for name in sorted(GATED if gated else PLAIN):
            want = small[down](Activation(name)(h))
            if all(isinstance(out, Tensor) and torch.allclose(out, want, rtol=1e-6, atol=1e-6) for out in have):
                return name
    raise InputError(f"{type(block).__name__}: what it computes is none of {', '.join(sorted(GATED | PLAIN))}")
