"""`nox -s bench -- --against REV` tells what is slower from noise, and what can't be compared from both."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import against
from against import Ratio, Revision, compare
from timing import interval

ENTRY = ["moe.grouped_mm", "small", "float32"]


class Planted:
    """A revision of which a call takes as long as is said, but for noise."""

    def __init__(self, seconds: float, **facts: Any) -> None:
        self.seconds = seconds
        self.facts = {"input": "x", "size": 1.0, "kernel": "some:kernel"} | facts
        self.noise = random.Random(seconds)

    def ask(self, **question: object) -> dict[str, Any]:
        """What `answering.py` would say."""
        return self.facts if question["do"] == "prepare" else {"seconds": self.seconds * self.noise.uniform(0.9, 1.1)}


def compared(ours: Any, theirs: Any) -> Ratio | str:
    return compare(ours, theirs, ENTRY, False, 21)


def test_a_slower_tree_is_told_from_noise() -> None:
    slower, same, faster = (compared(Planted(seconds), Planted(1.0)) for seconds in (1.2, 1.001, 0.8))
    assert isinstance(slower, Ratio)
    assert isinstance(same, Ratio)
    assert isinstance(faster, Ratio)
    assert slower.low > 1.03
    assert same.low < 1 < same.high
    assert faster.high < 1


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"input": "y"}, "other input"),
        ({"size": 1.5}, "results differ"),
        ({"error": "KeyError: no such op"}, "other revision: KeyError"),
    ],
)
def test_what_is_not_the_same_is_not_compared(facts: dict[str, Any], reason: str) -> None:
    found = compared(Planted(1.0), Planted(1.0, **facts))
    assert isinstance(found, str)
    assert reason in found


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    noise = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = interval([noise.lognormvariate(0, 0.3) for _ in range(21)], 0.9)
        held += low <= 1 <= high
    assert 0.9 <= held / 2000 <= 0.96
    with pytest.raises(ValueError, match="7 rounds are too few"):
        interval([1.0] * 7)


def test_a_process_answers_for_the_packages_that_it_has() -> None:
    revision = Revision(Path(sys.executable))
    try:
        assert ENTRY in revision.ask(do="list")["entries"]
        facts = revision.ask(do="prepare", op=ENTRY[0], case=ENTRY[1], dtype=ENTRY[2], training=True)
        assert facts["kernel"]
        assert facts["size"] > 0
        assert 0 < revision.ask(do="time", least=0.001)["seconds"] < 1
        assert "KeyError" in revision.ask(do="prepare", op="no.op", case="", dtype="float32", training=False)["error"]
    finally:
        revision.process.kill()
        revision.process.communicate()


def test_an_unknown_revision_is_refused() -> None:
    with pytest.raises(SystemExit, match="git knows no such revision"):
        against.environment_of("no-such-revision")
