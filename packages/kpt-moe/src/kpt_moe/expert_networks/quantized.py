"""Feed-forward experts with frozen 8-bit weights."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError, get_op
from kpt_moe._checks import require_known
from kpt_moe._dtypes import FLOAT8, NAMES_OF_FLOAT8
from kpt_moe._scales import in_blocks
from kpt_moe.experts import experts as experts_op

from .base import init_zeros, vectors
from .feed_forward import FeedForwardExpert, TwoProducts, require_feed_forward

#: What shares a scale.
SCHEMES = ("row", "128x128")


def scale_shape(shape: torch.Size, scheme: str) -> list[int]:
    """The shape of the scales of matrices `[num_experts, outputs, inputs]`."""
    num_experts, outputs, inputs = shape
    return [num_experts, outputs] if scheme == "row" else [num_experts, *in_blocks(outputs, inputs)]


class QuantizedFeedForwardExpert(TwoProducts):
    """`FeedForwardExpert` whose matrices are 8-bit floating-point numbers with scales: half the memory of bfloat16.

    Matrices and scales are frozen; gradients reach the tokens, the routing and the biases. Products are those of op
    `moe.scaled_grouped_mm`. They are named as in transformers' checkpoints: `gate_up_proj` with
    `gate_up_proj_scale_inv`, and `down_proj` with `down_proj_scale_inv`, which, despite the name, multiply. Converting
    the module to another dtype (`.to(torch.bfloat16)`) converts its biases and leaves matrices and scales as they are.

    A new one computes zeros, until a checkpoint is loaded; `from_feed_forward` quantises trained experts.

    Args:
        intermediate_size: inner width of an expert.
        activation: as in `FeedForwardExpert`.
        bias: give both projections a bias.
        scheme: of the scales: `row`, one for each output channel, or `128x128`, one for each block of 128 by 128
            (DeepSeek-V3).
        weight_dtype: of the matrices: float8_e4m3fn or float8_e5m2.
        dtype: of the biases.

    Raises:
        InputError: a size is not a positive integer, or `weight_dtype` is none of the two.
        UnknownNameError: no such activation or scheme.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        intermediate_size: int,
        activation: str = "swiglu",
        bias: bool = False,
        scheme: str = "128x128",
        weight_dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_experts=num_experts, intermediate_size=intermediate_size, activation=activation
        )
        require_known("scheme", scheme, SCHEMES)
        if weight_dtype not in FLOAT8:
            raise InputError(f"{type(self).__name__}: weight_dtype must be {NAMES_OF_FLOAT8}; got {weight_dtype}")
        self.scheme = scheme

        def frozen(outputs: int, inputs: int) -> tuple[nn.Parameter, nn.Parameter]:
            shape = torch.Size((num_experts, outputs, inputs))
            matrices = torch.zeros(shape, device=device, dtype=weight_dtype)
            scales = torch.ones(scale_shape(shape, scheme), device=device, dtype=torch.float32)
            return nn.Parameter(matrices, requires_grad=False), nn.Parameter(scales, requires_grad=False)

        self.gate_up_proj, self.gate_up_proj_scale_inv = frozen(self.width, hidden_size)
        self.down_proj, self.down_proj_scale_inv = frozen(hidden_size, intermediate_size)
        self.gate_up_proj_bias = vectors(bias, num_experts, self.width, device, dtype)
        self.down_proj_bias = vectors(bias, num_experts, hidden_size, device, dtype)
        init_zeros(self.gate_up_proj_bias, self.down_proj_bias)

    @classmethod
    def from_feed_forward(
        cls, experts: FeedForwardExpert, *, scheme: str = "128x128", dtype: torch.dtype = torch.float8_e4m3fn
    ) -> Self:
        """Quantise experts by kpt-fp8; they stay as they are, and share no memory with what is returned.

        One expert is quantised at a time: the memory needed beside the result is that of one matrix.

        Args:
            experts: with weights of float64, float32, bfloat16 or float16.
            scheme: `row` or `128x128`.
            dtype: float8_e4m3fn or float8_e5m2.

        Raises:
            InputError: no `FeedForwardExpert`, the weights hold NaN or infinity, the dtype is none of the two, or
                kpt-fp8 is not installed.
            UnknownNameError: no such scheme.
        """
        require_feed_forward(cls.__name__, experts)
        made = cls(**experts.sizes(), scheme=scheme, weight_dtype=dtype, device="meta", dtype=experts.down_proj.dtype)
        state = {name: value.clone() for name, value in experts.state_dict().items() if name.endswith("_bias")}
        for name in ("gate_up_proj", "down_proj"):
            state[name], state[f"{name}_scale_inv"] = cls._quantize(name, getattr(experts, name), scheme, dtype)
        made.load_state_dict(state, assign=True)
        return made.train(experts.training)

    @classmethod
    def _quantize(cls, name: str, weight: Tensor, scheme: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes and scales of `[num_experts, outputs, inputs]`."""
        try:
            quantize = get_op("fp8.quantize")
        except UnknownNameError as error:
            raise InputError(
                f"{cls.__name__}: experts are quantised by kpt-fp8 ({error}): pip install kpt-fp8"
            ) from error
        weight = weight.detach()
        codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        scale = torch.empty(scale_shape(weight.shape, scheme), dtype=torch.float32, device=weight.device)
        finite = torch.empty(len(weight), dtype=torch.bool, device=weight.device)
        for expert, matrix in enumerate(weight):
            codes[expert], scale[expert] = quantize(matrix, dtype=dtype, granularity=scheme)
            # Scales don't tell: the op saturates infinities.
            finite[expert] = matrix.float().isfinite().all()
        if not weight.is_meta and not bool(finite.all()):
            raise InputError(
                f"{cls.__name__}: {name} must hold finite numbers, whose scales float32 can hold; got others in "
                f"experts {(~finite).nonzero().flatten().tolist()}: repair those, or keep them unquantised"
            )
        return codes, scale

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As of `FeedForwardExpert`."""
        tensors = (x, index, weights, self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)
        return experts_op(
            *tensors,
            activation=self.activation,
            gate_up_scale=self.gate_up_proj_scale_inv,
            down_scale=self.down_proj_scale_inv,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        frozen = (self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj, self.down_proj_scale_inv)
        kept = {id(tensor) for tensor in frozen}

        def apply(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if id(tensor) in kept and changed.dtype is not tensor.dtype:
                # Converted codes would be wrong without their scales, and as large as what was quantised.
                return tensor.to(changed.device)
            return changed

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return f"{super().extra_repr()}, scheme={self.scheme!r}, weight_dtype={self.gate_up_proj.dtype}"
