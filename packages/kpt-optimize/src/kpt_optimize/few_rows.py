"""A linear layer that computes few rows by `linear.dense`, and is torch's own for all else."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kpt_core.errors import InputError
from kpt_optimize.rewrite import check_model

from .linear import linear

#: Of more rows arithmetic takes the time, and torch's own product is as good.
MOST_ROWS = 16
#: In bfloat16 with AMX, which multiplies more in the same time, of long rows more yet.
MOST_BF16_ROWS, MOST_LONG_ROWS, LONG = 32, 64, 1024
#: Weights that the op takes: quantised and distributed ones are tensors with rules of their own.
_PLAIN = (nn.Parameter, Tensor)
#: Whether this processor has it. Elsewhere the op would leave so many rows to torch after 30 µs of asking.
_AMX = bool(torch.cpu._is_amx_tile_supported())


class FewRowsLinear(nn.Linear):
    """A linear layer for steps of decoding: up to 16 rows without a gradient go to op `linear.dense`.

    In bfloat16 up to 32 do on a processor with AMX, or 64 of at least 1,024 numbers.

    Parameters, their names and the state dict are those of the layer that it was made of. A layer that trains, lies on
    an accelerator, has a quantised, distributed, complex or integer weight, or gets more rows computes as `nn.Linear`
    does; in a compiled graph, so does one of which the graph doesn't know that there are so few.
    """

    @classmethod
    def from_linear(cls, layer: nn.Linear) -> "FewRowsLinear":
        """Return a twin that shares parameters and hooks, those to come too: either may take the other's place.

        Raises:
            InputError: the layer is no plain `nn.Linear`.
        """
        if type(layer) is not nn.Linear:
            raise InputError(f"FewRowsLinear: expected an nn.Linear; got {type(layer).__name__}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        vars(made).update(vars(layer))  # the dictionaries themselves: a copy would keep a hook that its handle removes
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.t() + bias`, `[..., out_features]`."""
        if not input.is_cpu or torch.is_grad_enabled():
            return super().forward(input)
        shape = input.shape
        if len(shape) == 1:
            out: Tensor = self.forward(input[None])[0]
            return out
        inner = shape[-1] if shape else 0
        rows = input.numel() // inner if inner == self.in_features > 0 else 0  # torch's own says why
        most = MOST_ROWS
        if _AMX and input.dtype is torch.bfloat16:
            most = MOST_LONG_ROWS if inner >= LONG else MOST_BF16_ROWS
        if torch.compiler.is_compiling():
            known = statically_known_true(rows > 0) and statically_known_true(rows <= most)
            held: Any = self.weight
            if known and held.is_floating_point() and not is_traceable_wrapper_subclass(held):
                return linear(input, held, self.bias)
        elif 0 < rows <= most:
            # As a module has them: a step of decoding asks each layer, and `self.weight` takes four times as long.
            own: dict[str, Any] = self._parameters
            weight, bias = own.get("weight"), own.get("bias")
            if weight is None or (bias is None and "bias" not in own):  # pruned, for instance
                weight, bias = self.weight, self.bias
            if type(weight) in _PLAIN and weight.is_floating_point():  # else torch's own layer may know what it is
                return linear(input, weight, bias)
        return super().forward(input)


def serve_few_rows(model: nn.Module) -> list[str]:
    """Let every plain linear layer of a model compute few rows by `linear.dense`, in place; return their paths.

    Decoding reads each weight once a token: it takes as long as memory does. Results are those of the layers before but
    for the order of sums. Weights stay shared, tied ones too.

    Raises:
        InputError: `model` is no module.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> serve_few_rows(model)
        ['0']
    """
    check_model(model)
    found: dict[str, nn.Module] = {
        path: layer for path, layer in model.named_modules(remove_duplicate=False) if type(layer) is nn.Linear and path
    }
    for layer in set(found.values()):
        layer.__class__ = FewRowsLinear  # its hooks, and who else holds it, stay
    return list(found)
