"""Which kernel is chosen on which GPU, as the page says."""

import selection


def test_the_page_is_what_dispatch_chooses() -> None:
    told = "run `python tools/selection.py` and look at what changed"
    assert selection.PAGE.read_text(encoding="utf-8") == selection.page(), told


def test_attention_is_slow_nowhere_but_with_dropout_and_prefills_of_pages() -> None:
    table = selection.page().partition("## Why")[0]
    slow = {line.split(" | ")[0].strip("| ") for line in table.splitlines() if "**slow**" in line and "|" in line}
    attention = {words for words, (op, _, _) in selection.CALLS.items() if op == "attention.dense" or "step" in words}
    assert slow & attention == {"dropout, training"}
