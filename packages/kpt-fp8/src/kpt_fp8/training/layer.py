"""A linear layer that trains with 8-bit products: `FP8TrainingLinear`."""

from typing import Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_fp8.weight_state import FP8Module

from .recipe import FP8Recipe, recipe_of
from .watched import Watched


class FP8TrainingLinear(Watched, nn.Linear):
    """`nn.Linear` whose three products are of 8-bit numbers: output, gradient of the input, gradient of the weight.

    Weight and bias stay parameters of full precision, which an optimizer updates as ever; they are quantised at each
    call. Input and weight are e4m3, the gradient of the output is e5m2, each scaled as the recipe says. An infinity or
    NaN among them is never clamped away: it makes what depends on it NaN, so that it is found. Only delayed scales
    clamp: `observed` tells how many numbers. The state dict is that of `nn.Linear`, so a
    trained model is saved and loaded as one that was never converted; `delayed_state` has the histories.
    `convert_model_to_fp8` makes a trained model one for inference.

    With delayed scales, call `update_delayed_scales` after each step of the optimizer; `FP8TrainingEngine` does. Until
    then, and after an overflow, the layer scales by what is there.

    Args:
        in_features: K, positive.
        out_features: N, positive.
        bias: add a bias.
        recipe: an `FP8Recipe`, or `tensor`, `delayed`, `row`, `block` or `none`.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        recipe, observes, measures, observed, amax_history, scales: see `Watched`.

    Raises:
        InputError: a size is not positive, or the recipe does not fit.
        UnknownNameError: no such recipe.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: FP8Recipe | str = "tensor",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise InputError(f"{type(self).__name__}: {name} must be a positive integer; got {size!r}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.prepare(recipe_of(recipe), self.weight.device)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: FP8Recipe | str = "tensor") -> Self:
        """Return a layer that has the very parameters of another, so that an optimizer goes on with them.

        Raise `InputError` where that is no `nn.Linear`.
        """
        if isinstance(linear, FP8Module) or not isinstance(linear, nn.Linear):
            raise InputError(f"{cls.__name__}: linear must be an nn.Linear; got {type(linear).__name__}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made.prepare(recipe_of(recipe), made.weight.device)
        return made.train(linear.training)

    def without_fp8_training(self) -> nn.Linear:
        """Return an `nn.Linear` that has the very parameters of this layer."""
        made = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        made.weight, made.bias = self.weight, self.bias
        return made.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.t() + bias`, differentiable once: `[..., out_features]`.

        Under autocast the input is converted to autocast's dtype, which the result has; the weight is quantised as is.
        """
        if not self.recipe.quantises:
            return super().forward(input)
        if input.dim() == 0 or input.shape[-1] != self.in_features or not input.is_floating_point():
            raise InputError(
                f"{type(self).__name__}: input must be floating [..., {self.in_features}]; got {input.dtype} "
                f"{list(input.shape)}: check in_features"
            )
        return self.multiply(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{super().extra_repr()}, recipe={self.recipe}"
