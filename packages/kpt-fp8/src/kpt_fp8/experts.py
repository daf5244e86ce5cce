"""Experts of a Mixture-of-Experts layer with 8-bit weights: `NativeFP8Experts`, by op `moe.experts` of kpt-moe."""

from collections.abc import Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError, get_op

from .fp8_tensor import FP8Tensor
from .quality import Quality, QualityMeter
from .scales import scale_shape
from .weight_state import FP8Module
from .weights import quantize_weight

_OP = "moe.experts"
#: Of the op: other scales, or other formats of codes, it does not take.
_GRANULARITIES = ("row", "128x128")
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: The op's plain activations, by type of torch's and transformers' modules.
_PLAIN = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


class NativeFP8Experts(FP8Module):
    """The fused experts of a Hugging Face model, with frozen weights of 8-bit codes and scales.

    It is called as they are, with tokens and their routing, and runs op `moe.experts`. Gradients reach tokens, routing
    weights and biases. Activations are not quantised. Its state dict holds codes as `gate_up_proj` and `down_proj`,
    with `gate_up_proj_scale` and `down_proj_scale`: the layouts that the op takes.

    Args:
        gate_up_proj: `[experts, width, hidden_size]`; width is twice the intermediate size for gated activations.
        down_proj: `[experts, hidden_size, intermediate_size]`. Both have scales per `row` or `128x128`.
        gate_up_proj_bias: `[experts, width]`, or None.
        down_proj_bias: `[experts, hidden_size]`, or None.
        activation: as the op takes it.
        interleaved: rows of gate and up projection alternate.

    Raises:
        InputError: weights have other scales or another format.
        UnknownNameError: kpt-moe is not installed.
    """

    gate_up_proj: FP8Tensor
    down_proj: FP8Tensor

    def __init__(
        self,
        gate_up_proj: FP8Tensor,
        down_proj: FP8Tensor,
        gate_up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.op = get_op(_OP)
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            reason = format_refusal(weight.granularity, weight.codes.dtype)
            if reason or weight.dim() != 3:
                raise InputError(
                    f"{type(self).__name__}: {name} must be an FP8Tensor [experts, outputs, inputs] that op {_OP} "
                    f"takes; got {weight!r}{reason and ': ' + reason}"
                )
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
        for name, bias in (("gate_up_proj_bias", gate_up_proj_bias), ("down_proj_bias", down_proj_bias)):
            own = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)
            self.register_parameter(name, own)
        self.activation, self.interleaved = activation, interleaved
        self.num_experts = gate_up_proj.shape[0]

    @classmethod
    def from_experts(
        cls, experts: nn.Module, *, granularity: str = "row", dtype: torch.dtype = torch.float8_e4m3fn
    ) -> tuple[Self, Quality]:
        """Quantise a model's experts, one at a time, and tell how well the new weights stand for the old ones.

        Args:
            experts: a module that `is_fused_experts`; it stays as it is, and shares its biases with the result.
            granularity: `row` or `128x128`.
            dtype: of the codes: float8_e4m3fn or float8_e5m2.

        Raises:
            InputError: the op can't stand for them; see `refusal`.
        """
        reason = refusal(experts, granularity, dtype)
        if reason:
            raise InputError(f"{cls.__name__}: {type(experts).__name__} can't be converted: {reason}")
        module: Any = experts
        meter = QualityMeter()
        first = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = (
            _quantized(getattr(module, name), module, granularity, dtype, meter) for name in (first, "down_proj")
        )
        made = cls(
            up,
            down,
            getattr(module, f"{first}_bias", None),
            getattr(module, "down_proj_bias", None),
            activation=cast(str, _activation(module)),
            interleaved=module.has_gate and not module.is_concatenated,
        )
        return made.train(experts.training), meter.result()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token through its experts.

        Args:
            hidden_states: `[tokens, hidden_size]` of the biases' dtype, if there are some.
            top_k_index: `[tokens, top_k]`; ids that are no expert's contribute nothing.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden_size]` of `hidden_states`' dtype.

        Raises:
            InputError: a shape, dtype or device does not fit.
        """
        up, down = self.gate_up_proj, self.down_proj
        up.require_frozen()
        down.require_frozen()
        return self.op(  # type: ignore[no-any-return]
            hidden_states,
            top_k_index,
            top_k_weights,
            up.codes,
            down.codes,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            activation=self.activation,
            interleaved=self.interleaved,
            gate_up_scale=up.scale,
            down_scale=down.scale,
        )

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return (
            f"num_experts={self.num_experts}, activation={self.activation!r}, gate_up_proj={self.gate_up_proj!r}, "
            f"down_proj={self.down_proj!r}"
        )


def is_fused_experts(module: nn.Module) -> bool:
    """Tell whether a module holds experts as transformers fuses them: matrices of all experts in one parameter each."""
    return hasattr(module, "_apply_gate") and all(
        isinstance(weight := getattr(module, name, None), Tensor) and weight.dim() == 3
        for name in ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
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
        elif hasattr(experts, "_apply_gate"):
            inside = experts._apply_gate(inside)
        else:
            gate, up = inside.chunk(2, -1)
            inside = experts.act_fn(gate) * up
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
    if _activation(module) is None:
        return f"op {_OP} has no such activation ({type(getattr(module, 'act_fn', module)).__name__})"
    return format_refusal(granularity, dtype)


def format_refusal(granularity: str, dtype: torch.dtype) -> str:
    """Say why op `moe.experts` takes no such codes and scales; empty where it does."""
    if granularity not in _GRANULARITIES:
        return f"op {_OP} takes scales per {' or '.join(_GRANULARITIES)}, not {granularity}"
    return "" if dtype in _DTYPES else f"op {_OP} takes codes of float8_e4m3fn or float8_e5m2, not {dtype}"


def _activation(module: Any) -> str | None:
    act_fn = getattr(module, "act_fn", None)
    kind = type(act_fn)
    plain = _PLAIN.get(kind.__name__) if kind.__module__.startswith(("torch.nn.", "transformers.activations")) else None
    if not module.has_gate:
        return plain
    # A gate of its own may compute anything.
    default = getattr(type(module)._apply_gate, "__qualname__", "") == "_default_apply_gate"
    return _GATED.get(plain or "") if default else None


def _quantized(weight: Tensor, module: Any, granularity: str, dtype: torch.dtype, meter: QualityMeter) -> FP8Tensor:
    """`[experts, outputs, inputs]`, however the module stores it."""
    matrices = weight.detach().mT if module.is_transposed else weight.detach()
    codes = torch.empty(matrices.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(scale_shape(matrices.shape, granularity), device=weight.device, dtype=torch.float32)
    for own, scales, matrix in zip(codes, scale, matrices, strict=True):
        made, found, _ = quantize_weight(matrix, dtype=dtype, granularity=granularity, meter=meter)
        own.copy_(made)
        scales.copy_(found)
    return FP8Tensor(codes, scale, granularity, weight.dtype)
