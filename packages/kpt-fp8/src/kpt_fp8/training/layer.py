"""A linear layer that trains with 8-bit products: `FP8TrainingLinear`."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_core.autocast import without_autocast

from .product import How, Product
from .quantising import OBSERVED, ROLES
from .recipe import FP8Recipe, recipe_of


class FP8TrainingLinear(nn.Linear):
    """`nn.Linear` whose three products are of 8-bit numbers: output, gradient of the input, gradient of the weight.

    Weight and bias stay parameters of full precision, which an optimizer updates as ever; they are quantised at each
    call. Input and weight are e4m3, the gradient of the output is e5m2, each scaled as the recipe says. An infinity or
    NaN among them is never clamped away: it makes what depends on it NaN, so that it is found. Only delayed scales
    clamp: `observed` tells how many numbers. The state dict is that of `nn.Linear`; delayed scales add `amax_history`
    and `scales`.

    With delayed scales, call `update_delayed_scales` after each step of the optimizer; `FP8TrainingEngine` does. Until
    then, and after an overflow, the layer scales by what is there.

    Args:
        in_features, out_features: K and N, positive.
        bias: add a bias.
        recipe: an `FP8Recipe`, or `tensor`, `delayed`, `row`, `block` or `none`.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        recipe: of this layer; `set_recipe` changes it.
        observes: whether a forward or backward pass in training mode counts what happens.
        measures: whether it measures errors too, which reads all numbers once more.
        observed: `[3, 4]` float32: of input, weight and gradient the largest magnitude, the share of codes that
            saturated under a delayed scale, the share of codes that are zero, and the error if it was measured. Each is
            the maximum since `reset_observed`.
        amax_history: with delayed scales, `[3, history]` float32; None without.
        scales: with delayed scales, `[3]` float32, 0 where there is no history; None without.

    Raises:
        InputError: a size is not positive, or the recipe does not fit.
        UnknownNameError: no such recipe.
    """

    observed: Tensor
    amax_history: Tensor | None
    scales: Tensor | None

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
        self._prepare(recipe_of(recipe))

    def _prepare(self, recipe: FP8Recipe) -> None:
        self.observes, self.measures = True, False
        self.recipe = recipe
        #: By role, whether there is a history to scale by. It is known on the host, so that no call waits for a device.
        self.delayed_ready = (False, False, False)

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, device=self.weight.device, dtype=torch.float32)

        self.register_buffer("observed", new(len(ROLES), len(OBSERVED)), persistent=False)
        self.register_buffer("amax_history", new(len(ROLES), recipe.history) if recipe.delayed else None)
        self.register_buffer("scales", new(len(ROLES)) if recipe.delayed else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: FP8Recipe | str = "tensor") -> Self:
        """A layer that has the very parameters of another, so that an optimizer goes on with them.

        Raises:
            InputError: no `nn.Linear`, or the recipe does not fit.
            UnknownNameError: no such recipe.
        """
        if not isinstance(linear, nn.Linear):
            raise InputError(f"{cls.__name__}: linear must be an nn.Linear; got {type(linear).__name__}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made._prepare(recipe_of(recipe))
        return made.train(linear.training)

    def set_recipe(self, recipe: FP8Recipe) -> None:
        """Quantise in another way from now on. What `state_dict` holds stays as the first recipe made it.

        Raises:
            InputError: delayed scales are asked for, and the layer was not made with them.
        """
        if recipe.delayed and self.amax_history is None:
            raise InputError(
                f"{type(self).__name__}: delayed scales need a history; this layer was made with recipe {self.recipe}: "
                "make it with recipe='delayed'"
            )
        self.recipe = recipe

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.t() + bias`, differentiable once.

        Args:
            input: `[..., in_features]` floating. Under autocast it is converted to autocast's dtype; the weight is
                quantised as it is.

        Returns:
            `[..., out_features]` of `input`'s dtype, or autocast's.

        Raises:
            InputError: a shape, dtype or device does not fit.
        """
        if not self.recipe.quantises:
            return super().forward(input)
        if input.dim() == 0 or input.shape[-1] != self.in_features or not input.is_floating_point():
            raise InputError(
                f"{type(self).__name__}: input must be floating [..., {self.in_features}]; got {input.dtype} "
                f"{list(input.shape)}: check in_features"
            )
        where = input.device.type
        if torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where):
            input = input if input.dtype is torch.float64 else input.to(torch.get_autocast_dtype(where))
        delayed = self.recipe.delayed
        with without_autocast(where):
            rows: Tensor = Product.apply(  # type: ignore[no-untyped-call]
                input.reshape(-1, self.in_features),
                self.weight,
                self.bias,
                self.observed,
                self.scales if delayed else None,  # Dynamo takes no tensor twice
                How(
                    recipe=self.recipe,
                    delayed=self.delayed_ready,
                    observes=self.observes and self.training,
                    measures=self.measures,
                ),
            )
        return rows.reshape(*input.shape[:-1], self.out_features)

    def reset_observed(self) -> None:
        """Forget what was observed."""
        self.observed.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        given = state_dict.get(f"{prefix}scales")
        if self.scales is not None and given is not None:
            self.delayed_ready = ready(given.tolist())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {id(buffer) for buffer in self.buffers(recurse=False)}

        def apply(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            # `.half()` and the like are for the parameters: what is observed would be rounded, or overflow.
            return tensor.to(made.device) if id(tensor) in kept and made.dtype is not tensor.dtype else made

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{super().extra_repr()}, recipe={self.recipe}"


def ready(scales: list[float]) -> tuple[bool, bool, bool]:
    """By role, whether a delayed scale can be used."""
    of_input, of_weight, of_gradient = (scale > 0 for scale in scales)
    return of_input, of_weight, of_gradient
