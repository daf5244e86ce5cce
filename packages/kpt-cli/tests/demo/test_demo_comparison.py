import itertools

import pytest
import torch

from kpt_cli.demo import speed
from kpt_cli.demo.comparison import NOISE, Spread, median_interval, of_bytes, of_times

MIB = 2**20


def test_a_clear_gain_is_named():
    verdict = of_times("prefill", 100, [2.0, 2.1, 1.9] * 5, [1.0, 1.05, 0.95] * 5).verdict
    assert verdict == "2.00x faster"


def test_a_clear_loss_is_named():
    assert of_times("decode", 10, [1.0] * 15, [1.25] * 15).verdict == "1.25x slower"


def test_what_may_be_chance_is_no_gain():
    before, after = [1.0, 1.4, 0.9, 1.2, 1.1] * 3, [1.1, 0.9, 1.0, 1.3, 0.8] * 3
    assert of_times("prefill", 100, before, after).verdict == NOISE


def test_nothing_changed_is_noise():
    assert of_times("prefill", 100, [1.0] * 5, [1.0] * 5).verdict == NOISE


def test_too_few_rounds_are_no_gain():
    assert of_times("prefill", 100, [2.0] * 4, [1.0] * 4).verdict == NOISE


@pytest.mark.parametrize(("count", "inner"), [(8, 0), (9, 0), (15, 2), (25, 5)])
def test_interval_of_a_median_is_the_one_of_the_sign_test(count, inner):
    values = [float(value) for value in range(2, count + 2)]
    assert median_interval(values[::-1]) == (values[inner], values[-1 - inner])


def test_interval_of_a_median_of_few_values_holds_one():
    assert median_interval([2.0, 3.0]) == (1.0, 3.0)


def test_tokens_per_second():
    comparison = of_times("prefill", 100, [2.0] * 5, [1.0] * 5)
    assert comparison.before.median == 50
    assert comparison.after.median == 100


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([200, 201, 202], [100, 101, 102], "1.99x smaller"),
        ([100, 101, 102], [200, 201, 202], "1.99x larger"),
        ([100, 101, 105], [104, 110, 111], NOISE),
        ([200], [100], NOISE),
    ],
)
def test_memory_of_processes(before, after, verdict):
    sizes = ([size * MIB for size in part] for part in (before, after))
    assert of_bytes("peak", *sizes).verdict == verdict


def test_spread_of_one_run():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)


def test_spread_of_many_runs():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_the_interval_is_told_even_within_noise():
    comparison = of_times("prefill", 100, [1.0, 1.4, 0.9, 1.2, 1.1] * 3, [1.1, 0.9, 1.0, 1.3, 0.8] * 3)
    assert comparison.interval == f"{comparison.gain:.2f}x [{comparison.gain_low:.2f} to {comparison.gain_high:.2f}]"
    assert not comparison.settled
    assert of_times("decode", 10, [1.0] * 15, [1.25] * 15).settled


class FakeClock:
    """Times that jump, or do not."""

    def __init__(self, seconds):
        self.prefill = self.decode = seconds


@pytest.mark.parametrize(("after", "rounds"), [([0.5], 8), ([0.2, 1.5, 0.6, 3.0], 24)], ids=["quiet", "busy"])
def test_rounds_go_on_until_the_gain_is_known(monkeypatch, after, rounds):
    turns = itertools.cycle(after)
    monkeypatch.setattr(
        speed, "generate_timed", lambda model, *given: FakeClock(1.0 if model == "before" else next(turns))
    )
    found, _ = speed.compare_speed("before", "after", torch.zeros(1, 4), 3, 8, lambda done, total: None)
    assert {comparison.before.runs for comparison in found} == {rounds}
