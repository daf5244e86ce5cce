"""Timing functions in turn."""

import math
from itertools import pairwise

import pytest
import torch

from kpt_optimize import Load, gain_of, interleaved_times, measure
from kpt_optimize.measure import settled_times


def test_all_run_once_a_round_and_each_begins_and_follows_each_of_the_others():
    rounds, called = 40, list[int]()
    functions = [lambda index=index: called.append(index) for index in range(4)]
    times = interleaved_times(functions, torch.device("cpu"), rounds=rounds)
    assert [len(taken) for taken in times] == [rounds] * 4
    turns = [called[at : at + 4] for at in range(8, len(called), 4)]  # after two rounds of warm-up
    assert len(turns) == rounds
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert [sum(turn[0] == index for turn in turns) for index in range(4)] == [rounds / 4] * 4
    follows = {(a, b) for turn in turns for a, b in pairwise(turn)}
    assert follows == {(a, b) for a in range(4) for b in range(4) if a != b}


def test_two_functions_alternate():
    called = list[str]()
    interleaved_times([lambda: called.append("a"), lambda: called.append("b")], torch.device("cpu"), rounds=4)
    assert "".join(called[4:]) == "abbaabba"


def test_the_gain_is_the_median_of_the_rounds_ratios():
    assert gain_of([2.0, 4.0, 30.0], [1.0, 2.0, 3.0]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("ratios", "batches"),
    [
        ([1.0], 1),  # as quick, and steadily so
        ([2.0, 2.1, 1.9], 1),  # surely faster
        ([0.5, 3.0, 1.0, 2.2, 0.7], 5),  # the machine is busy
    ],
)
def test_timing_goes_on_until_the_ratio_is_known(monkeypatch, ratios, batches):
    asked = []

    def interleaved(functions, device, seconds):
        asked.append(seconds)
        return [ratios * 5, [1.0] * len(ratios) * 5]

    monkeypatch.setattr(measure, "interleaved_times", interleaved)
    times = settled_times((lambda: None, lambda: None), torch.device("cpu"), seconds=0.1)
    assert asked == [0.1] * batches
    assert [len(each) for each in times] == [len(ratios) * 5 * batches] * 2


@pytest.mark.parametrize(
    ("wall", "everyone", "own", "share"),
    [
        (4.0, 4.0, 4.0, 0.0),  # all of it is ours
        (4.0, 6.0, 4.0, 0.25),  # on two processors
        (4.0, 8.0, 1.0, 0.875),
        (4.0, 3.9, 4.0, 0.0),  # the system counts in ticks
        (4.0, 0.0, 4.0, None),  # it does not tell
        (0.01, 0.02, 0.0, None),  # too short to tell
    ],
)
def test_a_busy_machine_is_told_by_what_others_take(monkeypatch, wall, everyone, own, share):
    readings = iter([(0.0, 0.0, 0.0), (wall, everyone, own), (wall, everyone, own)])
    monkeypatch.setattr(measure, "_processor_seconds", lambda: next(readings))
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    load = Load()
    assert load.others() == share
    took = f"(other programs took {share or 0:.0%} of its processors)"
    assert load.note() == (f"{measure.AGAIN} {took}" if share else "")


def test_the_system_tells_what_all_programs_took():
    before = measure._processor_seconds()
    sum(range(3_000_000))
    wall, everyone, own = (new - old for new, old in zip(measure._processor_seconds(), before, strict=True))
    assert wall > 0
    assert own > 0
    assert everyone == 0 or everyone > own / 2


@pytest.mark.parametrize(
    ("gain", "noise", "what", "said"),
    [
        (1.19, 0.025, "faster", "1.19x faster (±2.5%)"),
        (1 / 1.19, 0.025, "faster", "1.19x slower (±2.5%)"),
        (1.01, 0.025, "faster", "as fast (±2.5%)"),
        (0.99, 0.025, "faster", "as fast (±2.5%)"),
        (1.001, 0.0001, "faster", "1.0010x faster (±0.0%)"),
        (4.0, 0.0, "faster", "4.00x faster"),
        (1.0, 0.0, "faster", "as fast"),
        (0.5, 0.0, "smaller", "2.00x larger"),
        (1.0, 0.0, "smaller", "as large"),
        (1.2, 0.2, "faster", "as fast (±20.0%)"),
        (480.58, 0.9, "faster", "faster, but too noisy for a figure (±90%)"),
        (0.1, 0.5, "faster", "slower, but too noisy for a figure (±50%)"),
        (1.5, 1.395, "faster", "too noisy for a figure (±140%)"),
        (None, 1.395, "faster", "too noisy (±140%)"),
    ],
)
def test_a_gain_in_words_has_no_figure_where_it_is_too_noisy(gain, noise, what, said) -> None:
    assert measure.describe_gain(gain, noise, what) == said


@pytest.mark.parametrize(
    ("before", "after", "gain", "share"),
    [
        ([2.0] * 5, [1.0] * 5, 2.0, 0.0),
        ([480.0, 2.0, 3.0, 900.0, 1.0], [1.0] * 5, 3.0, 2 * 1.86 * 2 / 5**0.5 / 3),
        ([0.0] * 5, [1.0] * 5, 0.0, math.inf),
    ],
)
def test_noise_is_twice_the_standard_error_as_a_share(before, after, gain, share) -> None:
    figure, error = measure.gain_of(before, after)
    assert figure == gain
    assert measure.noise_share(figure, error) == pytest.approx(share)


@pytest.mark.parametrize(
    ("others", "noisy", "said"),
    [
        (None, False, ""),
        (0.05, False, ""),
        (None, True, measure.AGAIN),
        (0.05, True, measure.AGAIN),
        (0.5, True, f"{measure.AGAIN} (other programs took 50% of its processors)"),
    ],
)
def test_a_busy_machine_has_one_note(monkeypatch, others, noisy, said) -> None:
    monkeypatch.setattr(measure.Load, "others", lambda load: others)
    assert measure.Load().note(noisy=noisy) == said


def test_complex_numbers_are_compared():
    value = torch.tensor([3 + 4j])
    assert measure.relative_error(value.conj(), value) == 2.0
    assert measure.rounding(value) == measure.rounding(value.real)
