"""Ops that draw random numbers: from their seed and offset alone, and of the right distribution."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_conformance.comparison import assert_same_bits, same_bits
from kpt_conformance.extent import over
from kpt_conformance.trial import Trial
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments

_SEEDS = 200
#: Seeds and offsets this far apart have to differ: none of their bits is left out.
_STEPS = (1, 2**8, 2**16, 2**24, 2**32, 2**40)
_FEW = 8
#: Deviations that two means may lie apart: some thousand elements are looked at, each a draw of its own.
_DEVIATIONS = 6.0


def _drawn(trial: Trial) -> Arguments:
    if not trial.subject.op.random:
        pytest.skip("the op draws no random numbers")
    arguments = trial.arguments()
    if not any(isinstance(value, Tensor) and value.numel() for value in arguments.values()):
        pytest.skip("nothing is drawn for no elements")
    return arguments


def _with(arguments: Arguments, **by: int) -> Arguments:
    """Another seed or offset, so much further."""
    return {**arguments, **{name: arguments.get(name, 0) + more for name, more in by.items()}}


@over(dtypes=True, telling=("dropout", "stochastic"))
def replayed(trial: Trial) -> None:
    """One seed and offset give the same bits, another seed or offset others; no global generator has a say."""
    arguments = _drawn(trial)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = trial.run(arguments).named()
        torch.manual_seed(1)
        assert_same_bits(first, trial.run(arguments).named(), "the same seed and offset gave other numbers")
    for name, step in itertools.product(("seed", "offset"), _STEPS):
        with kpt_core.use(REFERENCE):
            expected = _differ(trial, arguments, name, step)
        if expected:  # else nothing is drawn with such a rate, or too little
            with trial.subject.chosen():
                told = f"another {name}, larger by {step}, gives the same numbers"
                assert _differ(trial, arguments, name, step), told


def _differ(trial: Trial, arguments: Arguments, name: str, step: int) -> bool:
    """Whether results differ with a seed or offset that is larger by a step: of few elements, for one in several."""
    with torch.no_grad():
        for few in range(_FEW):
            by = ({name: more} for more in (few, few + step))
            one, other = (trial.outputs(trial.leaves(_with(arguments, **each))) for each in by)
            if any(not same_bits(one[key], other[key]) for key in one):
                return True
    return False


@over(telling=("dropout", "stochastic"))
def statistics(trial: Trial) -> None:
    """Mean and variance over many seeds are the reference's, of each element and of all, but for sampling."""
    arguments = _drawn(trial)
    with torch.no_grad():
        with trial.subject.chosen():
            got = _draws(trial, arguments)
        with kpt_core.use(REFERENCE):
            want = _draws(trial, arguments)
    for name, reference in want.items():
        if not reference.var(0).any():
            assert not got[name].var(0).any(), f"{name} varies with the seed; of such arguments nothing is drawn"
            continue
        for moment, power in (("mean", 1), ("mean square", 2)):
            found, expected = (
                torch.cat((each, each.mean(1, keepdim=True)), 1)  # all of a draw in one number
                for each in (_rows(got[name]) ** power, _rows(reference) ** power)
            )
            spread = ((found.var(0) + expected.var(0)) / _SEEDS).sqrt()
            # Of the largest: elements of which nothing is drawn may differ by terms that cancel.
            rounding = 4 * torch.finfo(trial.dtype).eps * expected.abs().amax()
            apart = (found.mean(0) - expected.mean(0)).abs() - _DEVIATIONS * spread - rounding
            worst = int(apart.argmax())
            assert apart.flatten()[worst] <= 0, (
                f"{name}: over {_SEEDS} seeds the {moment} of element {worst} of {reference[0].numel()} (then all) is "
                f"{found.mean(0).flatten()[worst].item():.4g}; expected {expected.mean(0).flatten()[worst].item():.4g}"
            )


def _rows(draws: Tensor) -> Tensor:
    """Draws of any shape, also of no dimension, as `[seeds, elements]`."""
    return draws.reshape(len(draws), -1)


def _draws(trial: Trial, arguments: Arguments) -> dict[str, Tensor]:
    """Every floating result that has elements for many seeds, `[seeds, *shape]` float64."""
    calls: list[dict[str, Any]] = [trial.outputs(trial.leaves(_with(arguments, seed=n))) for n in range(_SEEDS)]
    floating = [name for name, out in calls[0].items() if out.is_floating_point() and out.numel()]
    # Infinity, as the log-sum-exp of nothing is, has no mean; a number that none draws stands for it.
    largest = torch.finfo(torch.float32).max
    return {name: torch.stack([call[name] for call in calls]).double().clamp(-largest, largest) for name in floating}
