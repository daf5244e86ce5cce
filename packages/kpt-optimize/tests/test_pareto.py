"""The choices that nothing beats."""

import itertools
import random

import pytest
from torch import nn

from kpt_optimize import PlanEntry
from kpt_optimize.pareto import Version, front_of, in_force


def version(name: str, gain: float, error: float) -> Version:
    entry = PlanEntry(name, "rewrite", "op", "kernel", 1.0, error, True, "")
    return Version(entry, nn.Identity(), nn.Identity(), 0, 0.0, gain, error)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_beats_the_front(seed: int) -> None:
    generator = random.Random(seed)
    layers = [[version(f"layer{n}", generator.randint(1, 9), generator.random()) for _ in range(2)] for n in range(5)]
    steps = front_of([each for several in layers for each in several])
    choices = []
    for choice in itertools.product(*([None, *several] for several in layers)):
        taken = [each for each in choice if each is not None]
        choices.append((sum(each.gain for each in taken), sum(each.error**2 for each in taken)))
    for count in range(1, len(steps) + 1):
        taken = in_force(steps[:count])
        gained, paid = sum(each.gain for each in taken), sum(each.error**2 for each in taken)
        assert max(gain for gain, cost in choices if cost < paid * (1 - 1e-9)) < gained
        assert max(gain for gain, cost in choices if cost <= paid * (1 + 1e-9)) == pytest.approx(gained)
    assert gained == pytest.approx(sum(max(each.gain for each in several) for several in layers))


def test_what_costs_nothing_comes_first() -> None:
    steps = front_of([version("dear", 100, 0.5), version("free", 1, 0.0), version("idle", 0, 0.0)])
    assert [step.entry.module for step in steps] == ["free", "dear"]
    assert front_of([]) == []
