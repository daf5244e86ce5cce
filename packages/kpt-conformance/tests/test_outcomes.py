"""What a run says at its end of what a kernel refused."""

import pytest

from kpt_conformance.outcomes import Outcomes, reason_of

LISTED = """refused: no kernel for moe.grouped_mm on cpu: acme was asked for
  cpu (kpt.one:forward): acme was asked for (use or KPT_USE)
  acme (acme.gmm:forward): {reason}"""


def reason(sentence: str) -> str:
    return reason_of(LISTED.format(reason=sentence), "acme", "acme.gmm:forward")


def test_a_reason_is_the_kernels_own_and_one_short_line() -> None:
    assert reason("no bias") == "no bias"
    assert reason("no bias\nat all") == "no bias"
    assert len(reason("no " * 200)) == 160
    assert reason_of("refused: acme serves none of them", "acme", "a:b") == "acme serves none of them"


def test_a_sentence_says_the_most_frequent_reasons() -> None:
    run = Outcomes()
    for said in ("no bias", "few rows", "no bias", "odd rows", "few rows", "no bias"):
        run.add("acme: one", 6, "nans", "float16", {"refused": 1}, said)
    run.judge()
    (sentence,) = run.sentences
    assert sentence.endswith("leave float16 out of the kernel's dtypes. It said: no bias (3 times); few rows (2 times)")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ModuleNotFoundError: No module named 'foo'", "its module can't be imported: ModuleNotFoundError: No module"),
        ("AttributeError: no forwardd", "it could not be loaded: AttributeError: no forwardd"),
    ],
)
def test_what_could_not_be_loaded_is_said_once(said: str, told: str) -> None:
    run = Outcomes()
    for check in ("nans", "values"):
        run.add("acme: one", 2, check, "float16", {"refused": 1}, reason(f"could not be loaded: {said}"), ["dtype a"])
    run.judge()
    (sentence,) = run.sentences
    assert sentence.startswith(f"acme: one was never tried, because {told}")
    assert not run.untried


def test_what_was_always_refused_is_said() -> None:
    run = Outcomes()
    run.add("acme: one", 4, "values", "float32", {"passed": 1}, "", ["stored='KN'", "rows 1"])
    run.add("acme: one", 4, "values", "float32", {"refused": 1}, "no", ["stored='NK'", "rows 1"])
    run.add("acme: one", 4, "values", "float32", {"failed": 1}, "", ["rows 0"])
    run.add("acme: one", 4, "nans", "float32", {"skipped": 1}, "", ["rows past 64"])
    run.add("acme: cut short", 9, "values", "float32", {"refused": 1}, "no", ["rows 1"])
    run.judge()
    assert run.untried == ["acme: one never tried: stored='NK'"]


def test_what_was_always_refused_is_cut_off() -> None:
    run = Outcomes()
    run.add("acme: one", 2, "values", "float32", {"passed": 1})
    run.add("acme: one", 2, "values", "float32", {"refused": 1}, "no", [f"rows {number:02}" for number in range(20)])
    run.judge()
    assert run.untried[0].endswith("rows 06, rows 07 and 12 more")
