"""Figures of `FP8Compiler`: how FP8 changed a model, what it may gain, and what both are computed of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kpt_core import get_op
from kpt_optimize import Example
from kpt_optimize.devices.targets import Target, served

if TYPE_CHECKING:
    from kpt_fp8 import NativeFP8Linear

#: By op, the modules that serve it by 8-bit products.
_SERVED_BY = {"fp8.linear": ("gpu_linear",), "fp8.scaled_mm": ("gpu_scaled_mm", "gpu_scaled_mm_blocks")}
#: This one multiplies codes as they are on some chips.
_OF_CODES = "kpt_triton.fp8.scaled_mm:forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Statistics:
    """Tell of a prepared model.

    Attributes:
        layers: number of layers, and experts, that were converted.
        left: by name, why another one was left as it is.
        bytes_before, bytes_after: of the converted layers' weights, scales and biases; training keeps full precision.
        error: root mean square of the weights' quantisation error over that of the weights, of the worst layer; of
            training as its engine measured it last, None before.
        worst: that layer's name.
        unserved: by name, why the product does not multiply a converted layer's 8-bit numbers; of inference.
    """

    layers: int
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    error: float | None
    worst: str
    unserved: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        error = "not measured yet" if self.error is None else f"{self.error:.2%} in {self.worst}, the worst"
        first = (
            f"{self.layers} layers in FP8: {self.bytes_before:,} -> {self.bytes_after:,} bytes, weights' error {error}"
        )
        left = [f"{name or 'the model'}  left: {reason}" for name, reason in self.left.items()]
        return "\n".join([first, *left, *(f"{n}  not by 8-bit products: {why}" for n, why in self.unserved.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpeedup:
    """The roofline of one call of a linear layer, `[rows, inputs]` to `[rows, outputs]`.

    Attributes:
        before, after: seconds in bfloat16 and in FP8; equal where the layer is left as it is.
        bound: of FP8, `memory` or `arithmetic`.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    before: float
    after: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupEstimate:
    """Tell what linear layers gain over bfloat16 at most, by a product's data sheet; nothing was measured."""

    product: str
    layers: tuple[LayerSpeedup, ...]

    @property
    def ratio(self) -> float:
        """Return seconds in bfloat16 by those in FP8, of all calls together."""
        return sum(each.before for each in self.layers) / sum(each.after for each in self.layers)

    def __str__(self) -> str:
        told = f"linear layers on {self.product}: at most {self.ratio:.2f}x, by the data sheet; not a measurement"
        parts = (
            f"{each.name or 'the model'}  {each.rows} x {each.inputs} -> {each.outputs}  {1e6 * each.before:.3g} -> "
            f"{1e6 * each.after:.3g} us  {each.before / each.after:.2f}x, bound by {each.bound}"
            for each in self.layers
        )
        return "\n".join([told, *parts])


def converted_names(model: nn.Module, settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the layers that are in FP8, or would be."""
    from kpt_fp8 import NativeFP8Linear
    from kpt_fp8.selection import chosen_layers

    made = {name for name, each in model.named_modules() if isinstance(each, NativeFP8Linear)}
    asked: dict[str, Any] = {"include": None, "exclude": (), "min_features": 64, **settings}
    return made or {each.names[0] for each in chosen_layers("FP8Compiler", model, **asked).chosen}


def calls_of(model: nn.Module, linear: Mapping[str, nn.Linear], sample: Any) -> list[tuple[str, int]]:
    """Return each call of a linear layer in a run of the model: its name, and rows."""
    from kpt_fp8.trials import evaluating

    example, calls = Example.of(sample, "sample"), list[tuple[str, int]]()

    def note(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((name, args[0].numel() // args[0].shape[-1]))

    hooks = [each.register_forward_pre_hook(partial(note, name)) for name, each in linear.items()]
    try:
        with evaluating(model), torch.no_grad():
            model(*example.args, **example.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def refusal(layer: "NativeFP8Linear", target: Target) -> str:
    """Return why a product does not multiply a layer's 8-bit numbers; empty if it does."""
    by = layer.activations
    if by == "none":
        return "its activations stay in 16 bits"
    codes, scale = (torch.empty_like(each, device="meta") for each in (layer.weight.codes, layer.weight.scale))
    x = torch.empty(16, layer.in_features, dtype=layer.weight.dtype, device="meta")
    given: Any = layer.bias  # torch's hints forget that there may be none
    bias = None if given is None else torch.empty_like(given, device="meta")
    own = torch.empty((16,) if by == "row" else (), device="meta")
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "fp8.linear": ((x, codes, scale, bias), {"granularity": layer.granularity, "activations": by}),
        "fp8.scaled_mm": (
            (x.to(layer.activation_dtype), codes.t(), own, scale, bias),
            {"granularity_a": by, "granularity_b": layer.granularity, "out_dtype": x.dtype},
        ),
    }
    for name, (args, options) in arguments.items():
        op = get_op(name)
        found = served(op, op.bind(*args, **options), target)
        if found.kernel is not None and found.kernel.forward == _OF_CODES:
            from kpt_triton.fp8.scaled_mm import multiplies_codes

            if multiplies_codes(target.chip, layer.activation_dtype, codes.dtype, x.dtype):
                continue
        if found.kernel is None or _module(found.kernel.forward) not in _SERVED_BY[name]:
            told = [each.reason for each in found.refusals if _module(each.kernel or "") in _SERVED_BY[name]]
            return "; ".join(told) or f"no kernel of {name} is for it"
    return ""


def _module(kernel: str) -> str:
    """Return the name of a kernel's module."""
    return kernel.partition(":")[0].rpartition(".")[2]
