import itertools
from dataclasses import replace

import pytest
import torch

import kpt_core
from kpt_cli.demo import QUICK, measure
from kpt_cli.demo.measure import NOISE, kernels_used, median_interval, of_bytes, of_times, settled
from kpt_cli.demo.model import new_model

MIB = 2**20
NOISY = ([1.0, 1.4, 0.9, 1.2, 1.1] * 3, [1.1, 0.9, 1.0, 1.3, 0.8] * 3)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "known"),
    [
        ([2.0, 2.1, 1.9] * 5, [1.0, 1.05, 0.95] * 5, "2.00x faster", True),
        ([1.0] * 15, [1.25] * 15, "1.25x slower", True),
        (*NOISY, NOISE, False),
        ([1.0] * 5, [1.0] * 5, NOISE, True),
        ([2.0] * 4, [1.0] * 4, NOISE, False),
    ],
    ids=["gain", "loss", "chance", "nothing", "too few"],
)
def test_what_may_be_chance_is_no_gain(before, after, verdict, known):
    found = of_times("prefill", 100, before, after)
    assert found["verdict"] == verdict
    assert found["good"] == ("faster" in verdict)
    assert found["bad"] == ("slower" in verdict)
    assert found["interval"] == f"{found['gain']:.2f}x [{found['gain_low']:.2f} to {found['gain_high']:.2f}]"
    assert settled(found) == known


@pytest.mark.parametrize(("count", "inner"), [(8, 0), (9, 0), (15, 2), (25, 5)])
def test_interval_of_a_median_is_the_one_of_the_sign_test(count, inner):
    values = [float(value) for value in range(2, count + 2)]
    assert median_interval(values[::-1]) == (values[inner], values[-1 - inner])


def test_interval_of_a_median_of_few_values_holds_one():
    assert median_interval([2.0, 3.0]) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("seconds", "quartiles"), [([2.0], (50, 50, 50)), ([100 / n for n in (5, 1, 3, 2, 4)], (2, 3, 4))]
)
def test_quartiles_of_tokens_per_second(seconds, quartiles):
    found = of_times("prefill", 100, seconds, seconds)["before"]
    assert (found["low"], found["value"], found["high"]) == pytest.approx(quartiles)
    assert found["runs"] == len(seconds)


def test_the_speeds_that_are_shown_have_the_ratio_that_is_shown():
    found = of_times("prefill", 100, [1.0, 2.0, 4.0], [0.5, 1.6, 1.0])  # ratios of 2, 1.25 and 4; medians of 2 and 1
    assert found["gain"] == 2
    assert found["after"]["value"] == found["gain"] * found["before"]["value"]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([200, 201, 202], [100, 101, 102], "1.99x smaller"),
        ([100, 101, 102], [200, 201, 202], "1.99x larger"),
        ([100, 101, 105], [104, 110, 111], NOISE),
        ([200], [100], NOISE),
        ([1000, 1001], [1004, 1005], NOISE),
        ([1000, 1001], [1020, 1021], "1.02x larger"),
    ],
)
def test_memory_of_processes(before, after, verdict):
    sizes = ([size * MIB for size in part] for part in (before, after))
    assert of_bytes("peak", *sizes)["verdict"] == verdict


@pytest.mark.parametrize(("after", "rounds"), [([0.5], 8), ([0.2, 1.5, 0.6, 3.0], 24)], ids=["quiet", "busy"])
def test_rounds_go_on_until_the_gain_is_known(monkeypatch, after, rounds):
    turns = itertools.cycle(after)
    monkeypatch.setattr(
        measure, "generate_timed", lambda model, *given: (1.0 if model == "before" else next(turns),) * 2
    )
    settings = replace(QUICK, rounds=8)
    models, compared = {"before": "before", "after": "after"}, [("before", "after")]
    (found,) = measure.compare_speed(models, compared, torch.zeros(1, 4), settings, lambda done, total: None)
    assert {comparison["before"]["runs"] for comparison in found} == {rounds}


def test_every_op_is_told_with_its_modules():
    model = new_model(QUICK, 0, experts_implementation="kpt")
    row = kernels_used(model, torch.zeros(1, 5, dtype=torch.int64))[0]
    assert (row["op"], row["level"]) == ("moe.experts", 0)
    assert row["modules"] == [f"model.layers.{layer}.mlp.experts" for layer in range(QUICK.layers)]
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_forced_is_what_is_told():
    with kpt_core.use("reference"):
        rows = kernels_used(new_model(QUICK, 0, experts_implementation="kpt"), torch.zeros(1, 5, dtype=torch.int64))
    assert {row["kernel"] for row in rows} == {"reference"}
    assert all(row["why"] for row in rows)
