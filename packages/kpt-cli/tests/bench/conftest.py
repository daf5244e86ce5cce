"""Made-up timings: no test of a benchmark looks at a clock."""

import pytest

from kpt_cli.bench import contest, moe


@pytest.fixture
def made_up_times(monkeypatch):
    """Have each function called once and take the seconds that it has in the list, which can be changed."""
    taken: list[list[float]] = []

    def times(functions, device, seconds=0.6, rounds=None):
        for function in functions:
            function()
        return [taken[min(at, len(taken) - 1)] if taken else [1.0 + at] * 5 for at in range(len(functions))]

    for module in (contest, moe):
        monkeypatch.setattr(module, "interleaved_times", times)
    return taken
