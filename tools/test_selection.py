"""Which kernel is chosen on which GPU, as the page says."""

import selection


def test_the_page_is_what_dispatch_chooses() -> None:
    told = "run `python tools/selection.py` and look at what changed"
    assert selection.PAGE.read_text(encoding="utf-8") == selection.page(), told


def test_nothing_is_slow_on_any_chip() -> None:
    table = selection.page().partition("## Why")[0]
    slow = {line.split(" | ")[0].strip("| ") for line in table.splitlines() if "**slow**" in line and "|" in line}
    assert slow == set()
