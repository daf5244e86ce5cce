"""KPT beside what a user would have without it: the benchmark's contests, what is most wanted first."""

import os
from collections.abc import Iterator

import pytest
from devices import Ceilings, measure_ceilings
from harness import measure
from loads import LOADS, Load
from rows import Row
from setting import Setting

import kpt_core

#: Groups in this order, and of experts those of Qwen3 first.
_ORDER = ("attention", "attention step", "pages", "fp8", "step", "decode", "prefill", "graph")


def _loads(setting: Setting) -> Iterator[tuple[str, Load]]:
    for load in sorted(LOADS["cuda"][setting.tiny], key=_turn):
        yield _name(load), load


def _turn(load: Load) -> tuple[bool, int]:
    """Return what puts loads in their order: other experts than Qwen3's come last."""
    shape = load.sizes.get("shape")
    return shape is not None and "Qwen3" not in shape.name, _ORDER.index(load.group)


def _name(load: Load) -> str:
    silent = ("cuda", "inductor", "eager", load.group)
    sizes = {n: getattr(v, "name", v) for n, v in load.sizes.items() if v not in silent}
    told = ", ".join(str(v).removeprefix("torch.") if not isinstance(v, bool) else n for n, v in sizes.items() if v)
    return f"{load.group} {told}"


PARAMETERS = {"load": _loads}


@pytest.fixture(scope="session")
def ceilings(setting: Setting) -> Ceilings:
    """The device's best rates."""
    return measure_ceilings(setting.device, quick=setting.tiny)


def test_peers(load: Load, setting: Setting, ceilings: Ceilings, row: Row) -> None:
    """Right, and so many times as fast as each."""
    # As they are shipped: this machine's own tuning is left out.
    os.environ["KPT_TUNING"] = "no tables"
    kpt_core.refresh()
    contest = load.contest(setting.device, 0)
    row["line"] = measure(contest, ceilings, 0.05 if setting.tiny else 1.0, setting.device).as_dict()
