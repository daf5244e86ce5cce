"""Numbers of other magnitudes: denormal, small, large and infinite."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kpt_conformance.comparison import assert_right
from kpt_conformance.extent import over
from kpt_conformance.tensors import scalable, tensors_of, with_one, with_tensors
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

_SATURATING = "64 times larger"
#: What numbers around one are multiplied by, for a dtype's smallest normal number; exact in every dtype.
_FACTORS: dict[str, Callable[[float], float]] = {
    "denormal": lambda tiny: tiny / 16,
    "small": lambda tiny: 2.0 ** round(math.log2(tiny) / 4),
    _SATURATING: lambda tiny: 64.0,
}


@over(dtypes=True, telling=("score", "softcap"))
def magnitudes(trial: Trial) -> None:
    """Denormal, small and large numbers, one argument at a time and all, and infinities, give what the reference does.

    Who takes denormals for zero is right too, but for float16, whose denormals are not rare. Where the reference
    overflows nothing is promised. Infinities have a result alone: a derivative there is often that of a formula, not of
    the function.
    """
    arguments = trial.arguments()
    names = scalable(arguments)
    if not _infinite(arguments):
        pytest.skip("no argument is scaled or holds infinity")
    some = [[name] for name in names] + [names]
    for scaled in some if len(names) > 1 else some[: len(names)]:
        for what, factor in _FACTORS.items():
            if what == _SATURATING and trial.dtype is torch.float64:
                continue  # what is left of `1 - p` is judged by the reference's own error, which there is none of
            _require_magnitude(trial, _scaled(arguments, scaled, factor), f"with {', '.join(scaled)} {what}")
    forward = trial.forward_only()
    for name, infinity in zip(_infinite(arguments), itertools.cycle((-float("inf"), float("inf"))), strict=False):
        flat = tensors_of(arguments)[name].flatten().clone()
        flat[-1] = infinity
        made = with_one(arguments, name, flat.view(tensors_of(arguments)[name].shape))
        _require_magnitude(forward, made, f"with {infinity} in the last element of {name}")


def _infinite(arguments: Arguments) -> list[str]:
    """The floating arguments that can hold infinity, those of e5m2 among them."""
    infinity = torch.tensor(float("inf"))
    found = {name: tensor for name, tensor in tensors_of(arguments).items() if tensor.is_floating_point()}
    return [n for n, tensor in found.items() if tensor.numel() and infinity.to(tensor.dtype).double().isinf()]


def _scaled(arguments: Arguments, names: list[str], factor: Callable[[float], float]) -> Arguments:
    """The arguments, some of them times a factor for their dtype."""

    def scale(name: str, tensor: Tensor) -> Tensor:
        return tensor * factor(torch.finfo(tensor.dtype).tiny) if name in names else tensor

    return with_tensors(arguments, scale)


def _require_magnitude(trial: Trial, arguments: Arguments, what: str) -> None:
    """Raise `AssertionError` unless such arguments are computed as rightly as others."""
    __tracebackhide__ = True
    if not trial.takes(arguments):
        return
    baseline, oracle = trial.truth(arguments)
    floating = [
        (tensor, oracle.named()[name]) for name, tensor in baseline.named().items() if tensor.is_floating_point()
    ]
    if any(bool((base.double().isinf() & want.double().isfinite()).any()) for base, want in floating):
        return  # other sums may overflow elsewhere
    got = trial.run(arguments)
    disputed = {name: out for name, out in got.outputs.items() if not oracle.is_exact(name)}
    defined = {name: _undefined(out, oracle.outputs[name]) for name, out in disputed.items()}
    got = replace(got, outputs={**got.outputs, **defined})
    try:
        assert_right(got, baseline, oracle, what)
    except AssertionError:
        if all(oracle.is_exact(name) for name in oracle.named()):
            raise
        info = torch.finfo(trial.dtype)
        if trial.dtype is torch.float16:
            # Denormals lie a fixed step apart: one between two products is off by part of it in each term of a sum.
            step = info.tiny * info.eps * torch.tensor(oracle.reduction, dtype=torch.float64).sqrt()
            assert_right(got, baseline, oracle, what, dict.fromkeys(oracle.named(), step))
            return
        flushed = with_tensors(arguments, lambda name, tensor: _flushed(tensor))
        zeroed, named = trial.truth(flushed)[1].named(), oracle.named()
        apart = {name: (zeroed[name].double() - t.double()).abs() for name, t in named.items() if t.is_floating_point()}
        floor = {name: each.nan_to_num(0, 0, 0) + info.tiny for name, each in apart.items()}
        assert_right(got, baseline, oracle, what, floor)


def _undefined(out: Tensor, want: Tensor) -> Tensor:
    """What is expected in the place of what formulas disagree about: `inf - inf`, and which infinity."""
    if not out.is_floating_point():
        return out
    # Torch asks no float8 whether it is infinite.
    have, right = out.double(), want.to(out.device, torch.float64)
    return torch.where(right.isnan() | (right.isinf() & ~have.isfinite()), right, have).to(out.dtype)


def _flushed(tensor: Tensor) -> Tensor:
    """Zero in the place of denormals."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return tensor
    return tensor.where(~(tensor.abs() < torch.finfo(tensor.dtype).tiny), 0)
