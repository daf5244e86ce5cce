"""What a checkpoint's experts are loaded into, and what runs them: `StoredExperts`."""

from collections.abc import Callable
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import _default_apply_gate

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import QuantizedWeight, Scheme
from kpt_fp8.checkpoints.soundness import require_sound
from kpt_fp8.experts import is_transposed, unusual_part
from kpt_fp8.linear import NONE, linear
from kpt_fp8.native_linear import clamped
from kpt_fp8.scales import scale_shape

_SIDE = 128
_KPT, _EAGER = "kpt", "eager"


class StoredExperts(nn.Module):
    """The experts of a model with frozen 8-bit weights, run by kpt-moe or, one after the other, by op `fp8.linear`.

    Sizes, activation and biases are those of the model's own module. Whatever the layout there, `gate_up_proj`
    (`up_proj` without a gate) is `[experts, width, hidden_size]` with the gate's rows above the up projection's, and
    `down_proj` `[experts, hidden_size, intermediate_size]`.

    `gate_up_proj_scale_inv` has the scales of the gate's matrix and then those of the up projection's, as two matrices
    have them in the files: `[E, 2, 1]`, `[E, 2 * I, 1]` or `[E, 2 * ceil(I / 128), ceil(H / 128)]`; those of static
    activations likewise, `[E, 2, 1]`.

    Args:
        experts: the model's own; not changed.
        config: of the text model, for experts that have none.
        scheme: how the files have them.
        activations: quantise activations, too, where experts run one after the other.

    Raises:
        InputError: the module has something that has no 8-bit form.
    """

    def __init__(self, experts: Any, config: Any, scheme: Scheme, activations: bool) -> None:
        super().__init__()
        reason = unusual_part(experts)
        if reason:
            raise InputError(
                f"kpt_fp8.transformers: {type(experts).__name__} has no 8-bit form here: {reason}: exclude the experts "
                "where the checkpoint is converted, or load it with transformers"
            )
        # What the activation of the model's class reads.
        own = {name: value for name, value in vars(experts).items() if not name.startswith("_") and name != "training"}
        vars(self).update(own)
        for name, child in experts.named_children():
            self.add_module(name, child)
        self.kind = type(experts)
        self.config = getattr(experts, "config", config)
        self.has_gate = getattr(experts, "has_gate", True)
        self.has_bias = getattr(experts, "has_bias", False)
        self.interleaved = self.has_gate and not getattr(experts, "is_concatenated", True)
        self.is_transposed, self.is_concatenated, self._is_expert_parallel = False, True, False
        self.scheme, self.quantize_activations = scheme, activations
        blocks = scheme.granularity == "128x128"
        self.block_size = (_SIDE, _SIDE) if blocks else None
        for name, parts in self._projections():
            own = getattr(experts, name)
            count, rows, columns = own.mT.shape if is_transposed(experts) else own.shape
            one = scale_shape((rows // parts, columns), scheme.granularity)
            shape = [count, parts * (one[0] if one else 1), one[1] if blocks else 1]
            self._hold(name, torch.empty(count, rows, columns, dtype=scheme.dtype, device="meta"))
            self._hold(f"{name}_scale_inv", torch.empty(shape, dtype=torch.float32, device="meta"))
            if scheme.static:
                self._hold(f"{name}_activation_scale", torch.empty(count, parts, 1, dtype=torch.float32, device="meta"))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))
            self.num_experts: int = count

    def _projections(self) -> tuple[tuple[str, int], ...]:
        """Return the parameters of weights, and how many matrices of a checkpoint each of an expert is of."""
        return (("gate_up_proj", 2) if self.has_gate else ("up_proj", 1)), ("down_proj", 1)

    def _hold(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def _apply_gate(self) -> Callable[[Tensor], Tensor]:
        """Of the model's class; `MethodType`, so that kpt-moe sees which one."""
        own = getattr(self.kind, "_apply_gate", _default_apply_gate)
        return MethodType(_gate_of_alternating if self.interleaved else own, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move codes and scales as `fn` does; their dtypes are the format's, and stay."""
        biases = [getattr(self, f"{name}_bias") for name, _ in self._projections()]

        def moved(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))
            same = probe.dtype is tensor.dtype or any(tensor is each for each in biases)
            return fn(tensor) if same else tensor.to(probe.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def settle(self, name: str) -> None:
        """Put biases in the order of the weights, and raise `InputError` where codes or scales are not sound."""
        self.requires_grad_(False)  # transformers makes parameters that ask for gradients
        if self.interleaved and self.has_bias:
            bias: Any = self.gate_up_proj_bias
            bias.data = bias.data.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        for own, _ in self._projections():
            codes, scales = getattr(self, own), getattr(self, f"{own}_scale_inv")
            if codes.is_meta:
                continue
            given = getattr(self, f"{own}_activation_scale", None)
            for expert, (matrix, scale) in enumerate(zip(codes.detach(), scales.detach(), strict=True)):
                parts = max(self._parts(matrix, scale), 1 if given is None else given[expert].numel())
                inputs = [None] * parts if given is None else list(given[expert].detach().flatten())
                for half, part, static in zip(matrix.chunk(parts), scale.chunk(parts), inputs, strict=True):
                    shaped = part.reshape(scale_shape(half.shape, self.scheme.granularity))
                    weight = QuantizedWeight(half, shaped, self.scheme.granularity, static)
                    require_sound(f"{own} of expert {expert} of {name}", weight)

    def _parts(self, weight: Tensor, scale: Tensor) -> int:
        """Return how many matrices with scales apart a weight is of: two for the gate's and the up projection's."""
        rows = weight.shape[0]
        whole = {"tensor": 1, "row": rows, "128x128": -(-rows // _SIDE)}[self.scheme.granularity]
        return 1 if scale.shape[0] == whole else 2

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Send each token through its experts, by what `experts_implementation` names: "kpt" or "eager".

        Args:
            hidden_states: `[tokens, hidden_size]`.
            top_k_index: `[tokens, top_k]`; ids that are no expert's contribute nothing. None in Llama 4, whose rows are
                `[experts * tokens, hidden_size]`, zero where an expert was not chosen.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            Of the shape and dtype of `hidden_states`.

        Raises:
            InputError: another implementation is chosen, or there are adapters that it can't run.
        """
        chosen = self.config._experts_implementation or _EAGER
        if chosen not in (_KPT, _EAGER):
            raise InputError(
                f"kpt_fp8.transformers: experts_implementation={chosen!r} does not run 8-bit experts here: choose "
                f'"{_KPT}" or "{_EAGER}"'
            )
        if top_k_index is None or top_k_weights is None:
            hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
            owner = torch.arange(self.num_experts, device=hidden_states.device)
            owner = owner.repeat_interleave(hidden_states.shape[0] // self.num_experts)
            # A row of zeros remains one, so none is computed.
            top_k_index = torch.where(hidden_states.any(-1), owner, self.num_experts).unsqueeze(1)
            top_k_weights = hidden_states.new_ones(top_k_index.shape)
        if chosen == _KPT:
            return ALL_FP8_EXPERTS_FUNCTIONS[_KPT](self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        if nn.utils.parametrize.is_parametrized(self):  # an adapter of PEFT, which adds to codes as if to numbers
            raise InputError(
                f'kpt_fp8.transformers: adapters on 8-bit experts need experts_implementation="{_KPT}" (pip install '
                "kpt-moe); or give LoraConfig the names of linear layers in target_modules, as in ['q_proj', 'v_proj']"
            )
        return self._one_by_one(hidden_states, top_k_index, top_k_weights)

    def _one_by_one(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        (first, _), (last, _) = self._projections()
        for expert in top_k_index.unique().tolist():
            if 0 <= expert < self.num_experts:
                token, place = torch.where(top_k_index == expert)
                inside = self._product(hidden_states[token], first, expert)
                activation: Any = self._apply_gate if self.has_gate else self.act_fn
                inside = activation(inside)
                made = self._product(inside, last, expert)
                made = made * top_k_weights[token, place, None].to(made.dtype)
                total.index_add_(0, token, made.to(total.dtype))
        return total.to(hidden_states.dtype)

    def _product(self, rows: Tensor, name: str, expert: int) -> Tensor:
        """Multiply by one expert's matrix, or by the gate's and the up projection's, which scales keep apart."""
        weight, scales = getattr(self, name)[expert].detach(), getattr(self, f"{name}_scale_inv")[expert].detach()
        given, bias = getattr(self, f"{name}_activation_scale", None), getattr(self, f"{name}_bias")
        given = None if given is None or not self.quantize_activations else given[expert].reshape(-1)
        if self.quantize_activations and self.scheme.bound is not None:
            rows = clamped(rows, self.scheme.bound)
        parts = max(self._parts(weight, scales), 1 if given is None else given.numel())
        products = [
            linear(
                rows,
                codes,
                scale.reshape(scale_shape(codes.shape, self.scheme.granularity)),
                None,
                None if given is None else given[part],
                granularity=self.scheme.granularity,
                activations=self.scheme.activations if self.quantize_activations else NONE,
                activation_dtype=self.scheme.dtype,
            )
            for part, (codes, scale) in enumerate(zip(weight.chunk(parts), scales.chunk(parts), strict=True))
        ]
        made = products[0] if parts == 1 else torch.cat(products, -1)
        return made if bias is None else made + bias[expert]


def _gate_of_alternating(experts: Any, gate_up: Tensor) -> Tensor:
    """Apply the gate of a class that has rows of gate and up projection in turn to them one after the other."""
    return experts.kind._apply_gate(experts, gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))  # type: ignore[no-any-return]
