"""Experts of a Mixture-of-Experts layer with 8-bit weights: `NativeFP8Experts`, by kpt-moe or op `fp8.linear`."""

from collections.abc import Callable, Iterator
from importlib import import_module
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError, get_op

from .dequantize import dequantize
from .linear import NONE, linear
from .native_linear import clamped
from .quality import Quality, QualityMeter
from .scales import scale_shape
from .weights import quantize_weight

_OP = "moe.experts"
#: Of the op: other scales, or other formats of codes, it does not take.
_GRANULARITIES = ("row", "128x128")
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SIDE = 128
#: What may run them, as `experts_implementation` names it.
_KPT, _EAGER = "kpt", "eager"


class NativeFP8Experts(nn.Module):
    """The fused experts of a Hugging Face model with frozen 8-bit weights.

    They are called as the model's own are, and run by op `moe.experts` of kpt-moe, whose kernels may quantise dynamic
    activations; or one after the other by op `fp8.linear`, which does. Gradients reach tokens, routing weights and
    biases. Sizes, activation and biases are those of the model's own module. Whatever the layout there, `gate_up_proj`
    (`up_proj` without a gate) is `[experts, width, hidden_size]` with the gate's rows above the up projection's, and
    `down_proj` `[experts, hidden_size, intermediate_size]`.

    `gate_up_proj_scale_inv`, which despite the name multiplies, has the scales of the gate's matrix and then those of
    the up projection's, as checkpoints have them: `[E, 2, 1]`, `[E, 2 * I, 1]` or
    `[E, 2 * ceil(I / 128), ceil(H / 128)]`; those of static activations likewise, `[E, 2, 1]`.

    Args:
        experts: the model's own; not changed. Codes and scales are on the meta device: see `from_experts`.
        granularity: `tensor`, `row` or `128x128`.
        dtype: of the codes.
        activations: what op `fp8.linear` quantises activations by where it runs them, and kernels of `moe.experts` may
            (`row` and `1x128`, without static scales and bounds); `none` leaves them as they are.
        static: there are static scales of activations.
        input_bound: the largest magnitude of activations before they are quantised.
        config: of the text model, for experts that have none.
        implementation: "kpt" for kpt-moe, or "eager"; None: `_experts_implementation` of the configuration says it.

    Raises:
        InputError: the module has something that has no 8-bit form.
    """

    def __init__(
        self,
        experts: Any,
        *,
        granularity: str = "row",
        dtype: torch.dtype = torch.float8_e4m3fn,
        activations: str = NONE,
        static: bool = False,
        input_bound: float | None = None,
        config: Any = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        reason = unusual_part(experts)
        if reason:
            raise InputError(
                f"{type(self).__name__}: {type(experts).__name__} has no 8-bit form: {reason}: exclude the experts, or "
                "load the model with transformers"
            )
        # What the activation of the model's class reads.
        own = {name: value for name, value in vars(experts).items() if not name.startswith("_") and name != "training"}
        vars(self).update(own)
        for name, child in experts.named_children():
            self.add_module(name, child)
        self.kind, self.config, self.implementation = type(experts), getattr(experts, "config", config), implementation
        self.has_gate = getattr(experts, "has_gate", True)
        self.has_bias = any(name.endswith("_bias") for name, _ in experts.named_parameters(recurse=False))
        self.interleaved = self.has_gate and not getattr(experts, "is_concatenated", True)
        self.reordered = self.interleaved or is_transposed(experts)
        self.is_transposed, self.is_concatenated, self._is_expert_parallel = False, True, False
        self.granularity, self.activations, self.input_bound = granularity, activations, input_bound
        self.block_size = (_SIDE, _SIDE) if granularity == "128x128" else None
        for name, parts in self.projections():
            own = getattr(experts, name)
            count, rows, columns = own.mT.shape if is_transposed(experts) else own.shape
            one = scale_shape((rows // parts, columns), granularity)
            shape = [count, parts * (one[0] if one else 1), one[1] if len(one) > 1 else 1]
            self._hold(name, torch.empty(count, rows, columns, dtype=dtype, device="meta"))
            self._hold(f"{name}_scale_inv", torch.empty(shape, dtype=torch.float32, device="meta"))
            if static:
                self._hold(f"{name}_activation_scale", torch.empty(count, parts, 1, dtype=torch.float32, device="meta"))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))
            self.num_experts: int = count

    @classmethod
    def from_experts(
        cls, experts: nn.Module, *, granularity: str = "row", dtype: torch.dtype = torch.float8_e4m3fn
    ) -> tuple[Self, Quality]:
        """Quantise a model's experts, a matrix at a time, and tell how well the new weights stand for the old ones.

        Args:
            experts: a module that `is_stacked`; it stays as it is, and shares its biases with the result.
            granularity: `row` or `128x128`.
            dtype: of the codes: float8_e4m3fn or float8_e5m2.

        Raises:
            InputError: they can't be converted; see `refusal`.
        """
        reason = refusal(experts, granularity, dtype)
        if reason:
            raise InputError(f"{cls.__name__}: {type(experts).__name__} can't be converted: {reason}")
        made, meter = cls(experts, granularity=granularity, dtype=dtype, implementation=_KPT), QualityMeter()
        for name, parts in made.projections():
            weight = getattr(experts, name).detach()
            codes = torch.empty(getattr(made, name).shape, dtype=dtype, device=weight.device)
            scale = torch.empty(getattr(made, f"{name}_scale_inv").shape, device=weight.device)
            for own, scales, matrix in zip(codes, scale, weight.mT if is_transposed(experts) else weight, strict=True):
                halves = matrix.unflatten(0, (-1, parts)).unbind(1) if made.interleaved else matrix.chunk(parts)
                for into, scales_into, half in zip(own.chunk(parts), scales.chunk(parts), halves, strict=True):
                    done, found, _ = quantize_weight(half, dtype=dtype, granularity=granularity, meter=meter)
                    into.copy_(done)
                    scales_into.copy_(found.reshape(scales_into.shape))
            made._hold(name, codes)
            made._hold(f"{name}_scale_inv", scale)
        return made.train(experts.training), meter.result()

    def projections(self) -> tuple[tuple[str, int], ...]:
        """Return the parameters of weights, and how many matrices of a checkpoint each of an expert is of."""
        return (("gate_up_proj", 2) if self.has_gate else ("up_proj", 1)), ("down_proj", 1)

    def matrices(self, name: str) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """Yield expert, codes, scale and static scale of each matrix of a projection, as checkpoints have them."""
        codes, scales = getattr(self, name).detach(), getattr(self, f"{name}_scale_inv").detach()
        given = getattr(self, f"{name}_activation_scale", None)
        parts = dict(self.projections())[name]
        for expert, (own, scale) in enumerate(zip(codes, scales, strict=True)):
            inputs = [None] * parts if given is None else list(given[expert].detach().flatten())
            for half, part, static in zip(own.chunk(parts), scale.chunk(parts), inputs, strict=True):
                yield expert, half, part.reshape(scale_shape(half.shape, self.granularity)), static

    def dequantize(self, name: str) -> Tensor:
        """Return a projection of all experts as numbers `[experts, outputs, inputs]` of float32."""
        made = [
            dequantize(codes, scale, granularity=self.granularity, dtype=torch.float32)
            for _, codes, scale, _ in self.matrices(name)
        ]
        return torch.cat(made).view(getattr(self, name).shape)

    def bias(self, name: str) -> Tensor | None:
        """Return a projection's bias in the order of the weights; the parameter has the model's own."""
        own: Tensor | None = getattr(self, f"{name}_bias")
        alternate = own is not None and self.interleaved and name == "gate_up_proj"
        return own.unflatten(-1, (-1, 2)).mT.flatten(-2) if own is not None and alternate else own

    def _hold(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def _apply_gate(self) -> Callable[[Tensor], Tensor]:
        """Of the model's class, bound, so that kpt-moe sees which one."""
        own: Any = getattr(self.kind, "_apply_gate", _gate_by_halves)
        return MethodType(_gate_of_alternating if self.interleaved else own, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move codes and scales as `fn` does; their dtypes are the format's, and stay."""
        biases = [getattr(self, f"{name}_bias") for name, _ in self.projections()]

        def moved(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))
            same = probe.dtype is tensor.dtype or any(tensor is each for each in biases)
            return fn(tensor) if same else tensor.to(probe.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

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
        chosen = self.implementation or getattr(self.config, "_experts_implementation", None) or _EAGER
        if chosen not in (_KPT, _EAGER):
            raise InputError(
                f"{type(self).__name__}: experts_implementation={chosen!r} does not run 8-bit experts: choose "
                f'"{_KPT}" or "{_EAGER}"'
            )
        if top_k_index is None or top_k_weights is None:
            hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
            owner = torch.arange(self.num_experts, device=hidden_states.device)
            owner = owner.repeat_interleave(hidden_states.shape[0] // self.num_experts)
            # A row of zeros remains one, so none is computed.
            top_k_index = torch.where(hidden_states.any(-1), owner, self.num_experts).unsqueeze(1)
            top_k_weights = hidden_states.new_ones(top_k_index.shape)
        adapted = nn.utils.parametrize.is_parametrized(self)  # by PEFT, which adds to codes as if to numbers
        if adapted and self.reordered:
            raise InputError(
                f"{type(self).__name__}: matrices of {self.kind.__name__} are in another order here than in the model, "
                "so that an adapter on them would not fit it: give LoraConfig the names of linear layers in "
                "target_modules, as in ['q_proj', 'v_proj']"
            )
        if chosen == _KPT:
            run = _found.get(_KPT) or _find()
            return run(self, hidden_states, top_k_index, top_k_weights)
        if adapted:
            raise InputError(
                f'{type(self).__name__}: adapters on 8-bit experts need experts_implementation="{_KPT}" (pip install '
                "kpt-moe); or give LoraConfig the names of linear layers in target_modules, as in ['q_proj', 'v_proj']"
            )
        return self._one_by_one(hidden_states, top_k_index, top_k_weights)

    def _one_by_one(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        (first, _), (last, _) = self.projections()
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
        given, bias = getattr(self, f"{name}_activation_scale", None), self.bias(name)
        if self.activations != NONE and self.input_bound is not None:
            rows = clamped(rows, self.input_bound)
        parts = dict(self.projections())[name]
        if given is None and (
            self.granularity == "row" or (self.block_size and weight.shape[0] % (parts * _SIDE) == 0)
        ):
            parts = 1
        made = torch.cat([
            linear(
                rows,
                codes,
                scale.reshape(scale_shape(codes.shape, self.granularity)),
                None,
                None if given is None or self.activations == NONE else given[expert].reshape(-1)[part],
                granularity=self.granularity,
                activations=self.activations,
                activation_dtype=weight.dtype,
            )
            for part, (codes, scale) in enumerate(zip(weight.chunk(parts), scales.chunk(parts), strict=True))
        ], -1)  # fmt: skip
        return made if bias is None else made + bias[expert]

    def extra_repr(self) -> str:
        """For `print(module)`."""
        shapes = ", ".join(f"{name}={list(getattr(self, name).shape)}" for name, _ in self.projections())
        return f"{self.kind.__name__}, {shapes}, granularity={self.granularity!r}, activations={self.activations!r}"


#: What runs them, once it was looked for: a class does not hold what pickle would need KPT's other package for.
_found: dict[str, Callable[..., Tensor]] = {}


def _find() -> Callable[..., Tensor]:
    try:
        module = import_module("kpt_moe.transformers")
    except ImportError as error:
        raise InputError(
            f'NativeFP8Experts: experts_implementation="{_KPT}" is of kpt-moe ({error}): pip install kpt-moe'
        ) from error
    return _found.setdefault(_KPT, module.kpt_fp8_experts_forward)


def _gate_by_halves(experts: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return experts.act_fn(gate) * up  # type: ignore[no-any-return]


def _gate_of_alternating(experts: Any, gate_up: Tensor) -> Tensor:
    """Apply the gate of a class that has rows of gate and up projection in turn to them one after the other."""
    return experts.kind._apply_gate(experts, gate_up.unflatten(-1, (2, -1)).mT.flatten(-2))  # type: ignore[no-any-return]


def is_fused_experts(module: nn.Module) -> bool:
    """Tell whether a module holds experts as transformers fuses them: matrices of all experts in one parameter each."""
    return (
        hasattr(module, "_apply_gate")
        and not isinstance(module, NativeFP8Experts)
        and all(
            isinstance(weight := getattr(module, name, None), Tensor) and weight.dim() == 3
            for name in ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
        )
    )


def is_stacked(module: nn.Module) -> bool:
    """Tell whether a module holds matrices of all experts in one parameter each, called with a routing or rows."""
    return is_fused_experts(module) or takes_rows(type(module))


def takes_rows(kind: type[nn.Module]) -> bool:
    """Tell whether experts are called with the rows of each one after the other, without a routing: Llama 4's."""
    return kind.__name__ == "Llama4TextExperts"


def is_transposed(module: nn.Module) -> bool:
    """Tell whether matrices are stored as input by output."""
    return bool(getattr(module, "is_transposed", takes_rows(type(module))))


def unusual_part(experts: Any) -> str:
    """Return what keeps fused experts from being converted, whatever runs them; empty where nothing does."""
    known = {f"{name}{bias}" for name in ("gate_up_proj", "up_proj", "down_proj") for bias in ("", "_bias")}
    others = [name for name, _ in (*experts.named_parameters(), *experts.named_buffers()) if name not in known]
    if getattr(experts, "has_post_expert_norm", False) or others:
        return f"there is no place for its {others[0] if others else 'norm after each expert'}"
    return "its experts are spread over processes" if getattr(experts, "_is_expert_parallel", False) else ""


def inputs_of(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor | None = None, *_: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Compute what each matrix of fused experts is multiplied by, as their forward is called.

    Yields:
        Names as of matrices that a checkpoint has one by one, `0.gate_proj`, and their inputs `[rows, inputs]`.
    """
    first = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    weight, bias, transposed = getattr(experts, first), getattr(experts, f"{first}_bias", None), is_transposed(experts)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    each = rows.shape[0] // weight.shape[0]
    for expert, matrix in enumerate(weight):
        # Llama 4 gives every expert rows of its own.
        own = (
            rows[expert * each : (expert + 1) * each] if top_k_index is None else rows[(top_k_index == expert).any(-1)]
        )
        if own.numel() == 0:
            continue
        inside = own @ (matrix if transposed else matrix.mT)
        inside = inside if bias is None else inside + bias[expert]
        if first == "up_proj":
            inside = experts.act_fn(inside)
        else:
            inside = (
                experts._apply_gate(inside) if hasattr(experts, "_apply_gate") else _gate_by_halves(experts, inside)
            )
        yield from ((f"{expert}.{name}", own) for name in ("gate_proj", "up_proj")[first == "up_proj" :])
        yield f"{expert}.down_proj", inside


def refusal(experts: nn.Module, granularity: str, dtype: torch.dtype) -> str:
    """Say why op `moe.experts` can't run such experts in 8 bits; empty where it can."""
    module: Any = experts
    try:
        get_op(_OP)
    except UnknownNameError:
        return f"op {_OP} is not there: pip install ./packages/kpt-moe"
    reason = unusual_part(module)
    if reason:
        return reason
    return format_refusal(granularity, dtype)


def format_refusal(granularity: str, dtype: torch.dtype) -> str:
    """Say why op `moe.experts` takes no such codes and scales; empty where it does."""
    if granularity not in _GRANULARITIES:
        return f"op {_OP} takes scales per {' or '.join(_GRANULARITIES)}, not {granularity}"
    return "" if dtype in _DTYPES else f"op {_OP} takes codes of float8_e4m3fn or float8_e5m2, not {dtype}"
