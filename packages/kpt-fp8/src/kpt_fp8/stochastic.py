"""Stochastic rounding to an 8-bit format, from a seed and an offset alone."""

import torch
from torch import Tensor

from .formats import Format
from .scales import power_of_two

_LOW = 0xFFFFFFFF
#: Multipliers and steps of the key of Philox4x32 (Salmon et al., SC 2011), and its rounds.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: Numbers rounded at once: what is drawn for them, eight bytes a word, stays in a processor's cache. On other devices
#: each step is a launch, so it has more to do.
_AT_ONCE = 1 << 15
_AT_ONCE_ELSEWHERE = 1 << 22


def random_bits(count: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """The first of Philox4x32-10's four words for each element, `[count]` int64 between 0 and 2^32.

    The counter of element `i` is the 64 bits of `offset + i`, the key the 64 bits of `seed`: what
    `triton.language.randint(seed, offset + i)` gives. Takes some hundred bytes for each element.
    """
    signed = (offset + 2**63) % 2**64 - 2**63
    counter = torch.arange(count, dtype=torch.int64, device=device) + signed
    a, b = counter & _LOW, (counter >> 32) & _LOW
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    key = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = (second >> 32).bitwise_and_(_LOW).bitwise_xor_(b).bitwise_xor_(key[0])
        c = (first >> 32).bitwise_and_(_LOW).bitwise_xor_(d).bitwise_xor_(key[1])
        b, d = second.bitwise_and_(_LOW), first.bitwise_and_(_LOW)
        key = [(each + step) & _LOW for each, step in zip(key, _STEPS, strict=True)]
    return a


def round_stochastically(x: Tensor, to: Format, seed: int, offset: int) -> Tensor:
    """Round to a format's numbers on either side of `x`, the upper one the likelier the nearer it is.

    The magnitude is split into steps of the format and a fraction of one; it is rounded up where the fraction is more
    than the upper 24 bits of `random_bits` make of one. So the mean over many seeds is `x`, to 2^-24 of a step. `x` is
    float32 and no larger than the format's largest number; NaN stays. Of the seed, and of the offset, the number of the
    first element in row-major order, 64 bits count.
    """
    many = _AT_ONCE if x.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    parts = x.reshape(-1).split(many)
    return torch.cat([_rounded(part, to, seed, offset + many * i) for i, part in enumerate(parts)]).view(x.shape)


def _rounded(x: Tensor, to: Format, seed: int, offset: int) -> Tensor:
    magnitude = x.abs()
    _, exponent = torch.frexp(magnitude)
    # frexp has mantissas from 1/2: the first bit counts one less. Below the least normal number steps are all alike.
    step = power_of_two((exponent - 1).clamp(min=1 - to.bias) - to.mantissa_bits)
    steps = magnitude / step
    whole = steps.floor()
    drawn = (random_bits(x.shape[0], seed, offset, x.device) >> 8).to(torch.float32) * 2.0**-24
    return ((whole + (drawn < steps - whole)) * step).copysign(x)
