"""What a dense feed-forward block of a model computes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.activations import GATED, PLAIN, Activation
from kpt_moe.layers import SharedExperts

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
    """The projections of a dense feed-forward block, and what happens between them.

    Attributes:
        up: names of the linear modules that give gate and up, or both at once, or the plain pre-activation.
        down: name of the linear module that comes last.
        activation: a name of `Activation`.
        hidden_size: size of a token.
        intermediate_size: inner width.
        bias: whether the projections have biases.
    """

    up: tuple[str, ...]
    down: str
    activation: str
    hidden_size: int
    intermediate_size: int
    bias: bool

    @classmethod
    def of(cls, block: nn.Module) -> "DenseBlock":
        """Read a block; what it computes is asked of a twin in miniature, since its class does not say.

        Raises:
            InputError: it is none that is known, with the reason.
        """
        names = projections(block)
        linears = [] if names is None else [*names[0], names[1]]
        owner = type(block).__name__
        more = len([*block.parameters(), *block.buffers()])
        more -= sum(len([*block.get_submodule(name).parameters()]) for name in linears)
        if "forward" in vars(block):
            raise InputError(f"{owner}: its forward was replaced (by hooks of accelerate?): remove that first")
        if names is None or more:
            raise InputError(
                f"{owner}: is no dense feed-forward block of known projections (gate_proj, up_proj and down_proj; "
                "gate_up_proj and down_proj; up_proj and down_proj; fc1 and fc2; ...) and nothing else; it holds "
                f"{sorted(name for name, _ in block.named_children())}"
            )
        up, down = names
        hidden, inner = block.get_submodule(down).get_parameter("weight").shape
        biases = {block.get_submodule(name).bias is not None for name in linears}
        trained = {weight.requires_grad for weight in block.parameters()}
        if len(biases) > 1 or len(trained) > 1:
            what = "have a bias" if len(biases) > 1 else "require gradients"
            raise InputError(f"{owner}: some of its projections {what} and others don't, but gate and up become one")
        width = sum(len(block.get_submodule(name).get_parameter("weight")) for name in up)
        activation = _activation(block, up, down, gated=width == 2 * inner)
        return cls(up, down, activation, hidden, inner, biases == {True})

    def tensors(self, block: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The weights of gate and up, and of down, and both biases; the same memory where one module holds them."""
        linears = [block.get_submodule(name) for name in self.up]
        down = block.get_submodule(self.down)
        up_bias = _joined([linear.get_parameter("bias") for linear in linears]) if self.bias else None
        weight = _joined([linear.get_parameter("weight") for linear in linears])
        return weight, down.get_parameter("weight"), up_bias, down.get_parameter("bias") if self.bias else None

    def shared(self, block: nn.Module, gate: nn.Linear | None = None) -> SharedExperts:
        """The block as `SharedExperts`, with its own parameters where one of them is one of ours."""
        made = SharedExperts(
            self.hidden_size,
            self.intermediate_size,
            activation=self.activation,
            bias=self.bias,
            gated=gate is not None,
            device="meta",
        )
        up, down, up_bias, down_bias = self.tensors(block)
        trained = down.requires_grad
        for linear, weight, bias in ((made.gate_up_proj, up, up_bias), (made.down_proj, down, down_bias)):
            linear.weight = _parameter(weight, trained)
            if bias is not None:
                linear.bias = _parameter(bias, trained)
        if gate is not None:
            assert made.gate is not None
            made.gate.weight = gate.weight
        return made.train(block.training)

    def restore(self, block: nn.Module, shared: SharedExperts) -> None:
        """Give a block that was left without parameters those of `shared`."""
        for kind in ("weight", "bias") if self.bias else ("weight",):
            joined = shared.gate_up_proj.get_parameter(kind)
            parts = [joined]
            if len(self.up) > 1:
                halves = joined.detach().chunk(2)
                parts = [nn.Parameter(half.clone(), requires_grad=joined.requires_grad) for half in halves]
            for name, part in zip(self.up, parts, strict=True):
                block.get_submodule(name)._parameters[kind] = part
            block.get_submodule(self.down)._parameters[kind] = shared.down_proj.get_parameter(kind)


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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])


def _parameter(tensor: Tensor, trained: bool) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=trained)


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
