"""Faults in 8-bit numbers: how they are scaled, rounded, read and multiplied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpt_fp8.formats import FORMATS
from kpt_fp8.stochastic import random_bits

from .fp8_kernels import MUTANTS, Dequantize, Linear, Quantize, ScaledMM, fault, right

__all__ = ["MUTANTS", "right"]


def drawn(**sizes: Any) -> Callable[[Any], bool]:
    """Trials of cases with such options."""
    return lambda trial: all(trial.case.sizes.get(name) == value for name, value in sizes.items())


@fault("ties are rounded away from zero")
class _(Quantize):
    def rounded(self, call, quotient):
        away = torch.nextafter(quotient, quotient * float("inf"))
        return super().rounded(call, torch.where((quotient == 0) | (quotient.abs() == self.most(call)), quotient, away))


@fault("what is too large becomes NaN", at="given scale")
class _(Quantize):
    def clamped(self, call, quotient):
        return torch.where(quotient.abs() <= self.most(call), quotient, float("nan"))


@fault("infinity becomes NaN", "magnitudes")
class _(Quantize):
    def clamped(self, call, quotient):
        return torch.where(quotient.isinf(), float("nan"), super().clamped(call, quotient))


@fault("NaN has the code of the other sign", "nans")
class _(Quantize):
    def __call__(self, call):
        codes, scale = super().__call__(call)
        if FORMATS[call.dtype].special == 0x80:
            return codes, scale
        bits = codes.view(torch.uint8)
        return torch.where(bits == 0x7F, 0xFF, bits).view(call.dtype), scale


@fault("a NaN makes the scale NaN", "nans")
class _(Quantize):
    def scale_of(self, call, given):
        scale = super().scale_of(call, given)
        return scale + 0 * given["x"].nan_to_num(float("nan"), 0, 0).sum()


@fault("infinity counts for the scale", "magnitudes")
class _(Quantize):
    def scale_of(self, call, given):
        return super().scale_of(call, given | {"x": given["x"].nan_to_num(float("nan"))})


@fault("numbers are multiplied by the reciprocal of the scale")
class _(Quantize):
    def divided(self, call, x, scale):
        return x * (1 / scale)


@fault("the scale is the largest number times a reciprocal")
class _(Quantize):
    def scale_of(self, call, given):
        if call.scale_rounding != "none" or call.granularity != "tensor" or not given["x"].isfinite().any():
            return super().scale_of(call, given)
        scale = given["x"].abs().nan_to_num(0, 0).amax() * torch.tensor(1 / self.most(call))
        return torch.where(scale == 0, 1.0, scale.clamp(min=2.0**-126))


@fault("the scale is rounded to bfloat16")
class _(Quantize):
    def rounded_scale(self, call, scale):
        return scale.bfloat16().to(call.scale_dtype)


@fault("powers of two come from a rounded logarithm", at="near powers of two, down")
class _(Quantize):
    def scale_of(self, call, given):
        if call.scale_rounding != "down":
            return super().scale_of(call, given)
        scale = super().scale_of(call, given | {"scale_rounding": "none"})
        exponent = torch.frexp(torch.tensor(self.most(call)))[1] - 1
        power = torch.exp2((scale.double() * self.most(call)).log2().float().floor() - exponent).clamp(min=2.0**-126)
        return torch.where(scale == 1, super().scale_of(call, given), power)


@fault("e4m3fnuz is taken to reach 448", at=drawn(format=torch.float8_e4m3fnuz))
class _(Quantize):
    def most(self, call):
        return 448.0 if call.dtype is torch.float8_e4m3fnuz else super().most(call)

    def scale_of(self, call, given):
        return super().scale_of(call, given) * (super().most(call) / self.most(call))


@fault("codes below the normal numbers become zero", at=drawn(spread="wide"))
class _(Quantize):
    def rounded(self, call, quotient):
        rounded = super().rounded(call, quotient)
        return torch.where(rounded.abs() < 2.0 ** (1 - FORMATS[call.dtype].bias), rounded * 0, rounded)


@fault("a block that ends early has its neighbour's scale", at="blocks of rows")
class _(Quantize):
    def spread(self, call, scale, shape):
        width = {"1x128": 128, "1x32": 32}.get(call.granularity, 0)
        if width and shape[-1] % width and shape[-1] > width:
            scale = torch.cat((scale.float()[..., :-1], scale.float()[..., -2:-1]), -1)
        return super().spread(call, scale, shape)


@fault("scales of a square of blocks are transposed", at="square blocks that end early")
class _(Quantize):
    def scale_of(self, call, given):
        scale = super().scale_of(call, given)
        square = call.granularity == "128x128" and scale.shape[-1] == scale.shape[-2]
        return scale.mT.contiguous() if square else scale


@fault("zeros lose their sign", at=drawn(spread="zeros"))
class _(Quantize):
    def clamped(self, call, quotient):
        return super().clamped(call, quotient) + 0.0


@fault("scales are float32 whatever was asked for", "result_type", at="MXFP8")
class _(Quantize):
    def rounded_scale(self, call, scale):
        return scale


@fault("the seed has 32 bits", "replayed", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return random_bits(count, call.seed % 2**32, call.offset, call.x.device)


@fault("bits 8 to 15 of the seed are left out", "replayed", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return random_bits(count, call.seed & ~0xFF00, call.offset, call.x.device)


@fault("a negative seed counts as zero", at=drawn(seed=-3))
class _(Quantize):
    def drawn(self, call, count):
        return random_bits(count, max(call.seed, 0), call.offset, call.x.device)


@fault("of four dimensions the first has one scale each", at="four dimensions")
class _(Quantize):
    def scale_of(self, call, given):
        scale = super().scale_of(call, given)
        return scale[:, :1].expand_as(scale) if call.granularity == "row" and scale.dim() == 3 else scale


@fault("the offset is left out", "replayed", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return random_bits(count, call.seed, 0, call.x.device)


@fault("the offset has 32 bits", "replayed", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return random_bits(count, call.seed, call.offset % 2**32, call.x.device)


@fault("numbers are drawn from the global generator", "replayed", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return torch.randint(2**32, (count,))


@fault("more is rounded up than down", "statistics", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        return super().drawn(call, count) // 2


@fault("every row draws the same numbers", at="stochastic")
class _(Quantize):
    def drawn(self, call, count):
        width = call.x.shape[-1] if count else 1
        return super().drawn(call, width).repeat(count // width)


@fault("x is clamped in place", "inputs_unchanged")
class _(Quantize):
    def read(self, call):
        return call.x.detach().clamp_(-1, 1).to(torch.float32)


@fault("the exponent of e4m3fnuz has the bias of e4m3fn", at=drawn(format=torch.float8_e4m3fnuz))
class _(Dequantize):
    def decoded(self, call):
        return super().decoded(call) * (2 if call.codes.dtype is torch.float8_e4m3fnuz else 1)


@fault("codes below the normal numbers are read as zero", at="every code")
class _(Dequantize):
    def decoded(self, call):
        numbers = super().decoded(call)
        return torch.where(numbers.abs() < 2.0 ** (1 - FORMATS[call.codes.dtype].bias), numbers * 0, numbers)


@fault("codes of NaN are read as numbers", at="every code")
class _(Dequantize):
    def decoded(self, call):
        return super().decoded(call).nan_to_num(480.0)


@fault("infinity is read as a number", at="every code of e5m2")
class _(Dequantize):
    def decoded(self, call):
        numbers = super().decoded(call)
        return torch.where(numbers.isinf(), torch.sign(numbers) * 65536.0, numbers)


@fault("an exponent's code of zero is zero", at="every exponent")
class _(Dequantize):
    def scale(self, call):
        scale = super().scale(call)
        least = call.scale.dtype is torch.float8_e8m0fnu and scale == 2.0**-127
        return torch.where(least, 0.0, scale) if call.scale.dtype is torch.float8_e8m0fnu else scale


@fault("the product is rounded to half precision first")
class _(Dequantize):
    def __call__(self, call):
        return (self.decoded(call) * self.scale(call)).half().to(call.dtype)


@fault("scales of blocks are read by column", at="square blocks that end early")
class _(Dequantize):
    def scale(self, call):
        if call.granularity != "128x128":
            return super().scale(call)
        return super().scale(call._replace(scale=call.scale.float().mT.contiguous().view(call.scale.shape)))


@fault("K past a multiple of 32 is not summed", at="63 rows")
class _(ScaledMM):
    def product(self, left, right):
        whole = left.shape[1] // 32 * 32
        return left[:, :whole] @ right[:, :whole].t()


@fault("infinity of 8 bits is a number", "magnitudes", at="gradients of e5m2")
class _(ScaledMM):
    def left(self, call):
        left = super().left(call)
        return torch.where(left.isinf(), left.sign() * 65536.0, left)


@fault("scales of b are not transposed", at="blocks that end early")
class _(ScaledMM):
    def scale_b(self, call):
        scale = super().scale_b(call)
        return call.scale_b.reshape(scale.shape) if scale.dim() == 2 else scale


@fault("strided scales of b are read as if they were contiguous", at="blocks that end early")
class _(ScaledMM):
    def scale_b(self, call):
        if call.scale_b.dim() < 2:
            return call.scale_b
        inner, columns = call.scale_b.shape
        return call.scale_b.as_strided((inner, columns), (columns, 1)).t()


@fault("the result is bfloat16 whatever was asked for", "result_type")
class _(ScaledMM):
    def finished(self, call, product):
        return super().finished(call, product).bfloat16()


@fault("the sum is kept in half precision")
class _(ScaledMM):
    def product(self, left, right):
        return (left.half() @ right.half().t()).to(left.dtype)


@fault("the bias is added to what was rounded already", at="many results")
class _(ScaledMM):
    def finished(self, call, product):
        rounded = product.to(call.out_dtype)
        return rounded if call.bias is None else rounded + call.bias.to(call.out_dtype)


@fault("activations have one scale rather than one a row", at="dynamic activations")
class _(Linear):
    def rows(self, call):
        return super().rows(call._replace(activations="tensor") if call.activations == "row" else call)


@fault("a row of zeros is NaN", at="dynamic activations")
class _(Linear):
    def rows(self, call):
        rows = super().rows(call)
        nothing = call.x.abs().amax(1, keepdim=True) == 0 if call.x.numel() else False
        return torch.where(torch.as_tensor(nothing), float("nan"), rows) if call.activations == "row" else rows


@fault("a given input scale is left out", at="static activations")
class _(Linear):
    def rows(self, call):
        return super().rows(call._replace(input_scale=None))


@fault("the gradient leaves out the weight's scale")
class _(Linear):
    def backward(self, call, saved, grad):
        return super().backward(call._replace(scale=torch.ones_like(call.scale)), saved, grad)


@fault("the bias is added to what was rounded already", at="many results")
class _(Linear):
    def forward(self, call):
        out = super().forward(call._replace(bias=None))
        return out if call.bias is None else out + call.bias


@fault("the decoded weight is kept by its address", "changed_in_place")
class _(Linear):
    def __init__(self):
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def weight(self, call):
        key = (call.weight.data_ptr(), call.weight.shape, call.weight.dtype, call.granularity, call.x.dtype)
        if key not in self.kept:
            self.kept[key] = super().weight(call)
        return self.kept[key]


@fault("the weight's scale is kept by its address", "changed_in_place")
class _(Linear):
    def __init__(self):
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def weight(self, call):
        key = (call.scale.data_ptr(), call.scale.shape, call.scale.dtype)
        own = self.kept.setdefault(key, call.scale.clone())
        return super().weight(call._replace(scale=own))


@fault("a weight's scale of exponents is read as bytes", at="MXFP8")
class _(Linear):
    def weight(self, call):
        if call.scale.dtype is not torch.float8_e8m0fnu:
            return super().weight(call)
        return super().weight(call._replace(scale=call.scale.view(torch.uint8).float()))
