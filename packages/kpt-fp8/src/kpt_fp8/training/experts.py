"""Experts of a Mixture-of-Experts layer that train with 8-bit products: `FP8TrainingExperts`."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_fp8.experts import is_fused_experts, unusual_part

from .recipe import FP8Recipe, recipe_of
from .watched import Watched


class FP8TrainingExperts(nn.Module):
    """The fused experts of a Hugging Face model, each of which multiplies 8-bit numbers as `FP8TrainingLinear` does.

    It is called as they are, with tokens and their routing, and has their parameters, under the same names. Each expert
    has scales of its own, those of delayed scaling excepted, which all of them share. It runs expert after expert, so
    it is for models whose experts are large; `torch.compile` breaks its graph there.

    Make it by `from_experts`.

    Attributes:
        first_products: what is watched of the gate and up projections: a `Watched`.
        down_products: likewise of the down projection.
    """

    num_experts: int
    first_products: Watched
    down_products: Watched
    _original: tuple[Any]

    @classmethod
    def from_experts(cls, experts: nn.Module, recipe: FP8Recipe | str = "tensor") -> Self:
        """Take the very parameters of experts as transformers fuses them, so that an optimizer goes on with them.

        Raises:
            InputError: they can't be converted; the message says why.
            UnknownNameError: no such recipe.
        """
        reason = refusal(experts)
        if reason:
            raise InputError(f"{cls.__name__}: {type(experts).__name__} can't be converted: {reason}")
        made = cls()
        for name, parameter in experts.named_parameters(recurse=False):
            made.register_parameter(name, parameter)
        # For its activation, without its parameters: FSDP2 would not free them.
        bare = copy.copy(experts)
        bare._parameters = {}
        made._original = (bare,)  # no submodule of this one
        made.num_experts = int(getattr(experts, made._first).shape[0])
        for own in ("first_products", "down_products"):
            watched = Watched()
            watched.prepare(recipe_of(recipe), getattr(experts, made._first).device)
            setattr(made, own, watched)
        return made.train(experts.training)

    def without_fp8_training(self) -> nn.Module:
        """Return the experts as the model had them, with the very parameters of these."""
        made: nn.Module = copy.copy(self._original[0])
        made._parameters = dict(self._parameters)
        return made.train(self.training)

    @property
    def _first(self) -> str:
        return "gate_up_proj" if self._original[0].has_gate else "up_proj"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token through its experts, as `NativeFP8Experts` does."""
        original = self._original[0]
        activate = original._apply_gate if original.has_gate else original.act_fn
        experts = top_k_index.flatten()
        experts = torch.where((experts < 0) | (experts >= self.num_experts), self.num_experts, experts)
        counts = torch.bincount(experts, minlength=self.num_experts + 1).tolist()
        weights = top_k_weights.flatten()
        out = torch.zeros_like(hidden_states)
        for expert, places in enumerate(experts.argsort(stable=True).split(counts)[: self.num_experts]):
            if not len(places):
                continue
            tokens = places // top_k_index.shape[1]
            hidden = activate(self._multiply(self.first_products, self._first, expert, hidden_states[tokens]))
            partial = self._multiply(self.down_products, "down_proj", expert, hidden) * weights[places, None]
            out.index_add_(0, tokens, partial.to(out.dtype))
        return out

    def _multiply(self, products: Watched, name: str, expert: int, rows: Tensor) -> Tensor:
        weight, bias = getattr(self, name)[expert], getattr(self, f"{name}_bias", None)
        matrix = weight.t() if self._original[0].is_transposed else weight
        return products.multiply(rows, matrix, None if bias is None else bias[expert])

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"num_experts={self.num_experts}, recipe={self.first_products.recipe}"


def refusal(experts: nn.Module) -> str:
    """Say why experts can't train in 8 bits; empty where they can."""
    if not is_fused_experts(experts):
        return "it holds no experts as transformers fuses them"
    return unusual_part(experts)
