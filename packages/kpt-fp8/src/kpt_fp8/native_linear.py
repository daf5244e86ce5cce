"""A linear layer whose weight stays 8-bit: `NativeFP8Linear`."""

from collections.abc import Callable
from numbers import Real
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from kpt_core import InputError, UnknownNameError

from .formats import require_fp8
from .fp8_tensor import FP8Tensor
from .linear import NONE
from .linear import linear as linear_op
from .quality import QualityMeter
from .scales import BLOCKS, scale_shape
from .weight_state import FP8Module, separate
from .weights import MXFP8, quantize_weight, require_finite, scale_format

#: What activations are quantised to beside a weight: no device multiplies e5m2 by e5m2.
ACTIVATION_DTYPES = {
    torch.float8_e4m3fn: torch.float8_e4m3fn,
    torch.float8_e5m2: torch.float8_e4m3fn,
    torch.float8_e4m3fnuz: torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: torch.float8_e4m3fnuz,
}


class NativeFP8Linear(FP8Module, nn.Linear):
    """`nn.Linear` with a frozen weight of 8-bit codes and scales; it runs op `fp8.linear`.

    In memory are codes, scales and bias, nothing else. `weight` is an `FP8Tensor`: its dtype is the one that it stands
    for, so code that converts inputs to `weight.dtype` works as with `nn.Linear`, and `.to(dtype)`, `.half()` and the
    like change what it stands for, not the codes. Gradients reach `x` and the bias. The weight is a frozen parameter,
    not a buffer: FSDP2 shards and gathers it, in 8 bits. An optimizer skips it, since it never has a gradient;
    `requires_grad_(True)` on it makes the next call fail with a sentence.

    The state dict holds plain tensors, which safetensors and other tools take: codes as `weight`, `weight_scale`,
    `bias` if there is one, and `input_scale` if activations have a static scale. Loading copies nothing into a layer
    where they have another format than the layer.

    It is an `nn.Linear` to other libraries: PEFT puts adapters on it, and merging one quantises the weight again, which
    rounds what was merged to 8 bits.

    A new one computes zeros, until a checkpoint is loaded; `from_linear` quantises a trained layer, and `from_fp8`
    takes what is quantised.

    Args:
        in_features: K, positive.
        out_features: N, positive.
        bias: add a bias.
        granularity: what shares a scale of the weight: `tensor`, `row`, `1x128`, `128x128`, `1x32`, or `mxfp8`, which
            is `1x32` with scales that are powers of two in 8 bits.
        activations: likewise of the activations, which are quantised at each call; `none` leaves them as they are.
        dtype: of the codes: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz.
        static: have an `input_scale`, float32 `[]`, 1 at first. For `activations="tensor"` alone: other scales depend
            on the number of rows.
        bias_dtype: of the bias, and what the weight stands for; None is torch's default.
        device: of the parameters.

    Raises:
        InputError: a size is not positive, no such format, or `static` without `activations="tensor"`.
        UnknownNameError: no such granularity.
    """

    weight: FP8Tensor
    input_scale: Tensor | None
    input_bound: float | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        granularity: str = "row",
        activations: str = NONE,
        dtype: torch.dtype = torch.float8_e4m3fn,
        static: bool = False,
        bias_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's makes a weight
        owner = type(self).__name__
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise InputError(f"{owner}: {name} must be a positive integer; got {size!r}")
        require_fp8(owner, "dtype", dtype)
        self.granularity, scale_dtype, _ = scale_format(granularity, False)
        if activations not in (NONE, *BLOCKS, MXFP8):
            raise UnknownNameError("granularity of activations", activations, (NONE, *BLOCKS, MXFP8))
        if static and activations != "tensor":
            raise InputError(
                f"{owner}: a static input scale is one number, for activations='tensor'; got activations="
                f"{activations!r}: give 'tensor', or no input scale"
            )
        self.in_features, self.out_features = in_features, out_features
        self.activations, self.activation_rounding = NONE, "none"
        if activations != NONE:
            self.activations, _, self.activation_rounding = scale_format(activations, False)
        self.code_dtype, self.activation_dtype = dtype, ACTIVATION_DTYPES[dtype]
        shape = (out_features, in_features)
        codes = torch.zeros(shape, device=device, dtype=dtype)
        scales = torch.ones(scale_shape(shape, self.granularity), device=device, dtype=scale_dtype)
        stands_for = bias_dtype or torch.get_default_dtype()
        self._set_weight(FP8Tensor(codes, scales, self.granularity, stands_for))
        own = nn.Parameter(torch.zeros(out_features, device=device, dtype=bias_dtype)) if bias else None
        self.register_parameter("bias", own)
        # A buffer: FSDP2 shards no parameter without dimensions, and mixed precision would round one.
        self.register_buffer("input_scale", torch.ones((), device=device, dtype=torch.float32) if static else None)

    def _set_weight(self, weight: FP8Tensor) -> None:
        self.weight = cast(FP8Tensor, nn.Parameter(weight, requires_grad=False))

    @property
    def weight_scale(self) -> Tensor:
        """The scales of the weight, sharing its memory; a DTensor where the weight is one."""
        return separate(self.weight)[1]

    @classmethod
    def from_fp8(
        cls,
        weight: FP8Tensor,
        bias: Tensor | None = None,
        *,
        activations: str = NONE,
        input_scale: Tensor | float | None = None,
        input_bound: float | None = None,
    ) -> Self:
        """The layer of a weight that is quantised, as from a checkpoint; it shares its memory, and the bias's.

        Args:
            weight: `[out_features, in_features]`, not transposed.
            bias: `[out_features]` floating, or None; a parameter stays the parameter that it is.
            activations: what shares a scale of the activations, as the class takes it.
            input_scale: what activations are divided by, one positive number (static); None: what they ask for
                themselves at each call (dynamic).
            input_bound: clamp activations to this magnitude before they are quantised, as fbgemm_fp8 does.

        Raises:
            InputError: a shape or an argument does not fit.
            UnknownNameError: no such granularity.
        """
        owner = cls.__name__
        given: object = weight
        if not isinstance(given, FP8Tensor) or given.dim() != 2 or given.transposed:
            got = repr(given) if isinstance(given, FP8Tensor) else type(given).__name__
            raise InputError(
                f"{owner}: weight must be an FP8Tensor [out_features, in_features], not transposed; got {got}: make "
                "one with FP8Tensor(codes, scale, granularity, dtype)"
            )
        if bias is not None and (list(bias.shape) != [weight.shape[0]] or not bias.is_floating_point()):
            raise InputError(f"{owner}: bias must be floating [{weight.shape[0]}]; got {bias.dtype} {list(bias.shape)}")
        static = None if input_scale is None else one_positive(owner, "input_scale", input_scale)
        made = cls(
            weight.shape[1],
            weight.shape[0],
            bias is not None,
            granularity=weight.granularity,
            activations=activations,
            dtype=weight.codes.dtype,
            static=static is not None,
            device="meta",
        )
        made._set_weight(weight)
        made.input_bound = None if input_bound is None else one_positive(owner, "input_bound", input_bound)
        if bias is not None:
            made.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        if static is not None:
            made.input_scale = torch.tensor(static, device=weight.device, dtype=torch.float32)
        return made

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        granularity: str = "row",
        activations: str = NONE,
        dtype: torch.dtype = torch.float8_e4m3fn,
        input_scale: Tensor | float | None = None,
        meter: QualityMeter | None = None,
    ) -> Self:
        """Quantise a layer; it stays as it is, and shares no memory with what is returned.

        Args:
            linear: with a weight of float64, float32, bfloat16 or float16.
            granularity: what shares a scale of the weight, as the class takes it.
            activations: likewise of the activations; `none` leaves them as they are.
            dtype: of the codes.
            input_scale: what activations are divided by, one positive number (static); None: what they ask for
                themselves at each call (dynamic).
            meter: counts how well the new weight stands for the old one.

        Raises:
            InputError: no `nn.Linear`, its weight has another dtype, no data, NaN or infinity, or an argument does not
                fit.
            UnknownNameError: no such granularity.
        """
        if isinstance(linear, NativeFP8Linear) or not isinstance(linear, nn.Linear):
            raise InputError(f"{cls.__name__}: linear must be an nn.Linear; got {type(linear).__name__}")
        cls(1, 1, granularity=granularity, activations=activations, dtype=dtype, device="meta")  # before any work
        require_finite(cls.__name__, "weight", linear.weight)
        codes, scale, _ = quantize_weight(linear.weight, dtype=dtype, granularity=granularity, meter=meter)
        weight = FP8Tensor(codes, scale, scale_format(granularity, False)[0], linear.weight.dtype)
        bias = linear.bias
        if bias is not None:
            bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        made = cls.from_fp8(weight, bias, activations=activations, input_scale=input_scale)
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `input @ weight.t() + bias` by op `fp8.linear`: `[..., out_features]` of `input`'s dtype.

        `input` has the bias's dtype; any floating one without a bias or under autocast.
        """
        shape = input.shape
        if not shape or shape[-1] != self.in_features:
            raise InputError(
                f"{type(self).__name__}: input must be [..., {self.in_features}]; got {list(shape)}: check in_features"
            )
        # As a module has them: a step of decoding asks each layer, and `self.weight` takes four times as long.
        parameters, buffers = self._parameters, self._buffers
        weight: Any = parameters.get("weight")
        bias, input_scale = parameters.get("bias"), buffers.get("input_scale")
        if weight is None or (bias is None and "bias" not in parameters):
            weight, bias = self.weight, self.bias
        if input_scale is None and "input_scale" not in buffers:
            input_scale = self.input_scale
        weight.require_frozen()
        if self.input_bound is not None:
            input = clamped(input, self.input_bound)
        rows = linear_op(
            input if len(shape) == 2 else input.reshape(-1, self.in_features),
            weight.codes,
            weight.scale,
            bias,
            input_scale,
            granularity=self.granularity,
            activations=self.activations,
            activation_dtype=self.activation_dtype,
            activation_rounding=self.activation_rounding,
        )
        if len(shape) == 2:
            return rows
        whole = (*shape[:-1], self.out_features)
        if not rows.requires_grad:
            return rows.view(whole)  # sooner found than the other, which matters where one row is decoded
        # As F.linear does it: a view of the rows could not be changed in place under FSDP2.
        return torch.ops.aten._unsafe_view(rows, whole)  # type: ignore[no-any-return]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the weight stands for, `[out_features, in_features]` of `dtype`."""
        return self.weight.dequantize(dtype)

    def reset_parameters(self) -> None:
        """Compute zeros, as a new layer does."""
        weight = getattr(self.weight, "_local_tensor", self.weight)
        weight.codes.view(torch.uint8).zero_()
        weight.scale.fill_(1)
        if self.input_scale is not None:  # after `to_empty` it holds anything
            self.input_scale.fill_(1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale, self.input_scale = self.input_scale, None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self.input_scale = scale
        if scale is not None:
            moved = fn(scale)
            # Rounded, it would be another one than that of the calibration.
            self.input_scale = moved if moved.dtype is scale.dtype else scale.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """For `print(module)`."""
        static = self.input_scale is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"granularity={self.granularity!r}, activations={self.activations!r}, static={static}, "
            f"{'' if self.input_bound is None else f'input_bound={self.input_bound}, '}dtype={self.code_dtype}"
        )


def clamped(x: Tensor, bound: float) -> Tensor:
    """Clamp numbers to a magnitude; an infinity becomes NaN, so that an overflow is seen."""
    return x.clamp(-bound, bound) + (x - x)


def one_positive(owner: str, name: str, scale: object) -> float:
    """A scale as a number; raise `InputError` unless it is one, positive and finite."""
    if not isinstance(scale, Tensor | Real) or (isinstance(scale, Tensor) and scale.numel() != 1):
        got = f"a tensor of shape {list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise InputError(f"{owner}: {name} must be one number; got {got}: give what calibrate gives")
    number = float(scale)
    if not 0 < number < float("inf"):
        raise InputError(f"{owner}: {name} must be positive and finite; got {number}: calibrate again")
    return number
