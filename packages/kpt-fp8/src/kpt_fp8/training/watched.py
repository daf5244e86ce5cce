"""Multiplying by a weight in 8 bits, and watching what happens: `Watched`."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_core.autocast import without_autocast
from kpt_core.dispatch import under_transform

from .opaque import opaque_product
from .product import How, Product, plain_product
from .quantizing import GRADIENT, OBSERVED, ROLES
from .recipe import FP8Recipe


class Watched(nn.Module):
    """What `FP8TrainingLinear` and the products of `FP8TrainingExperts` share: a recipe, scales, and what is observed.

    Attributes:
        recipe: how numbers are quantised; `set_recipe` changes it.
        observes: whether a forward or backward pass in training mode counts what happens.
        measures: whether it measures errors too, which reads all numbers once more.
        observed: a copy, `[3, 4]` float32: of input, weight and gradient the largest magnitude, the share of codes that
            saturated under a delayed scale, the share of codes that are zero, and the error if it was measured. Each is
            the maximum since `reset_observed`.
        amax_history: with delayed scales, `[3, history]` float32; None without.
        scales: with delayed scales, `[3]` float32, 0 where there is no history; None without.
        delayed_ready: by role, whether there is a history to scale by. It is known on the host, so that no call waits
            for a device.
    """

    recipe: FP8Recipe
    observed_forward: Tensor
    observed_gradient: Tensor
    amax_history: Tensor | None
    scales: Tensor | None

    def prepare(self, recipe: FP8Recipe, device: torch.device) -> None:
        """Set all of this; a constructor calls it."""
        self.observes, self.measures = True, False
        self.recipe = recipe
        self.delayed_ready = (False, False, False)

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=torch.float32)

        # Apart from the weights, whose state dict is for every other program too: `delayed_state` has them.
        # Two, since a compiled backward pass writes the whole of a buffer: it would undo what other forward passes saw.
        self.register_buffer("observed_forward", new(GRADIENT, len(OBSERVED)), persistent=False)
        self.register_buffer("observed_gradient", new(1, len(OBSERVED)), persistent=False)
        for name, shape in (("amax_history", (len(ROLES), recipe.history)), ("scales", (len(ROLES),))):
            self.register_buffer(name, new(*shape) if recipe.delayed else None, persistent=False)

    @property
    def observed(self) -> Tensor:
        """Return what was observed, by role; see `Watched`."""
        return torch.cat((self.observed_forward, self.observed_gradient))

    def set_observed(self, observed: Tensor) -> None:
        """Set what was observed, as `observed` gave it."""
        self.observed_forward.copy_(observed[:GRADIENT])
        self.observed_gradient.copy_(observed[GRADIENT:])

    def set_recipe(self, recipe: FP8Recipe) -> None:
        """Quantise in another way from now on. Histories stay as the first recipe made them."""
        if recipe.delayed and self.amax_history is None:
            raise InputError(
                f"{type(self).__name__}: delayed scales need a history; this layer was made with recipe {self.recipe}: "
                "make it with recipe='delayed'"
            )
        self.recipe = recipe

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `input @ weight.t() + bias` by the recipe, differentiable once, under torch.func without a limit.

        Under autocast `input` is converted to autocast's dtype, which the result has; the weight is quantised as it is.
        """
        if not self.recipe.quantises:
            return nn.functional.linear(input, weight, bias)
        where = input.device.type
        if torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where):
            input = input if input.dtype is torch.float64 else input.to(torch.get_autocast_dtype(where))
        delayed = self.recipe.delayed
        with without_autocast(where):
            # 19 nodes of a compiler's graphs for a layer, of both passes, where there would be 140.
            compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
            multiply = plain_product if under_transform() else opaque_product if compiled else Product.apply
            rows: Tensor = multiply(
                input.reshape(-1, weight.shape[1]),
                weight,
                bias,
                self.observed_forward,
                self.observed_gradient,
                self.scales if delayed else None,  # Dynamo takes no tensor twice
                How(
                    recipe=self.recipe,
                    # What is evaluated need not be as large as what trained, and no history follows it.
                    delayed=self.delayed_ready if self.training else (False, False, False),
                    observes=self.observes and self.training,
                    measures=self.measures,
                ),
            )
        return rows.reshape(*input.shape[:-1], weight.shape[0])

    def reset_observed(self) -> None:
        """Forget what was observed."""
        self.observed_forward.zero_()
        self.observed_gradient.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {id(buffer) for buffer in self.buffers(recurse=False)}

        def apply(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            # `.half()` and the like are for the parameters: what is observed would be rounded, or overflow.
            return tensor.to(made.device) if id(tensor) in kept and made.dtype is not tensor.dtype else made

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self


def ready(scales: list[float]) -> tuple[bool, bool, bool]:
    """By role, whether a delayed scale can be used."""
    of_input, of_weight, of_gradient = (scale > 0 for scale in scales)
    return of_input, of_weight, of_gradient
