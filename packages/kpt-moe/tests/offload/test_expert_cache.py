"""The cache keeps to its budget, drops the least recently used, and survives failures and threads."""

import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, KptError
from kpt_moe.offload.cache import ExpertCache, ExpertWeights, Key, bytes_of

SIZES = (10, 30)


def weights(key: Key) -> ExpertWeights:
    return lambda: {"w": torch.tensor(key)}


def make(budget: int, load=weights, background: bool = False) -> ExpertCache:
    return ExpertCache(budget, load, SIZES, ("first", "second"), background=background)


def use(cache: ExpertCache, *keys: Key) -> None:
    for key in keys:
        cache.begin([key])
        assert cache.use(key)["w"].tolist() == list(key)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1), (1e18, 10**18), ("7", 7), ("512MiB", 2**29), ("1.5 GB", 15 * 10**8), ("2kb", 2000), ("1TiB", 2**40),
        ("25%", 250), ("12.5 %", 125),
    ],
)  # fmt: skip
def test_budgets_are_numbers_or_strings(budget, expected):
    assert bytes_of(budget, 1000) == expected


@pytest.mark.parametrize(
    "budget", [0, -1, "", "MiB", "3 apples", "-5MB", float("inf"), float("nan"), True, None, "1.2.3"]
)
def test_other_budgets_are_refused(budget):
    with pytest.raises(InputError, match=r"budget must be a positive number of bytes, or a string like '512MiB'"):
        bytes_of(budget, 1000)


def test_a_budget_below_one_expert_says_the_least_that_works():
    with pytest.raises(InputError, match=r"29 bytes holds no expert of 'second': give at least 30 bytes"):
        make(29)
    use(make(30), (1, 0), (0, 0))


@given(st.integers(30, 100), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=40))
def test_least_recently_used_go_first(budget, keys):
    cache = make(budget)
    there: OrderedDict[tuple[int, int], int] = OrderedDict()
    hits, evictions, moved = [0, 0], [0, 0], [0, 0]
    for key in keys:
        use(cache, key)
        hits[key[0]] += key in there
        if key not in there:
            moved[key[0]] += SIZES[key[0]]
            while sum(there.values()) + SIZES[key[0]] > budget:
                evictions[there.popitem(last=False)[0][0]] += 1
        there[key] = SIZES[key[0]]
        there.move_to_end(key)
        assert cache.used == sum(there.values()) <= budget
    for layer, count in enumerate(cache.statistics):
        calls = sum(key[0] == layer for key in keys)
        assert (count.hits, count.misses) == (hits[layer], calls - hits[layer])
        assert (count.evictions, count.bytes_moved) == (evictions[layer], moved[layer])
        assert count.hit_rate == (hits[layer] / calls if calls else 0)


def test_what_is_there_comes_first():
    cache = make(30)
    use(cache, (0, 2), (0, 0))
    assert cache.begin([(0, 0), (0, 1), (0, 2)]) == [(0, 0), (0, 2), (0, 1)]


class Loads:
    """A load that waits to be let go, and may fail."""

    def __init__(self) -> None:
        self.begun: list[Key] = []
        self.go = threading.Event()
        self.broken: set[Key] = set()

    def __call__(self, key: Key) -> ExpertWeights:
        self.begun.append(key)
        assert self.go.wait(60)
        if key in self.broken:
            raise OSError("no such sector")
        return weights(key)


def test_ahead_of_need_nothing_is_dropped_that_the_call_needs():
    loads = Loads()
    loads.go.set()
    cache = make(30, loads, background=True)
    use(cache, (0, 0), (0, 1))
    assert cache.begin([(0, 1), (0, 2)], [(0, 3), (0, 4)]) == [(0, 1), (0, 2)]
    assert cache.used == 30, "what was predicted takes the place of (0, 0), and there is none for (0, 4)"
    for key in ((0, 1), (0, 2), (0, 3)):
        assert cache.use(key)["w"].tolist() == list(key)
    assert sorted(loads.begun) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    count = cache.statistics[0]
    assert (count.hits, count.misses, count.evictions, count.bytes_moved) == (1, 3, 1, 40)
    cache.close()
    assert cache.used == 0


def test_what_waits_is_loaded_by_who_needs_it_and_forgotten_if_nobody_does():
    loads = Loads()
    cache = make(50, loads, background=True)
    cache.begin([(0, 0)], [(0, 1), (0, 2)])
    while not loads.begun:
        pass
    assert cache.begin([(0, 2)]) == [(0, 2)], "it is on its way"
    assert (cache.used, cache.statistics[0].bytes_moved) == (20, 20)
    loads.go.set()
    for key in ((0, 2), (0, 0)):
        assert cache.use(key)["w"].tolist() == list(key)
    cache.close()
    assert sorted(loads.begun) == [(0, 0), (0, 2)]


def test_room_is_made_once_the_load_of_what_goes_is_over():
    loads = Loads()
    cache = make(30, loads, background=True)
    cache.begin([(1, 0)])
    while not loads.begun:
        pass
    cache.begin([(1, 1)])
    threading.Timer(0.05, loads.go.set).start()
    assert cache.use((1, 1))["w"].tolist() == [1, 1]
    assert (cache.used, cache.statistics[1].evictions) == (30, 1)
    cache.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_load_names_the_expert_and_the_cache_goes_on(background):
    loads = Loads()
    loads.go.set()
    cache = make(30, loads, background)
    use(cache, (0, 0))
    loads.broken = {(0, 3)}
    for _ in range(2):
        with pytest.raises(KptError, match="expert 3 of 'first' could not be loaded: no such sector") as raised:
            use(cache, (0, 3))
        assert isinstance(raised.value.__cause__, OSError)
    assert (cache.used, cache.statistics[0].bytes_moved) == (10, 10)
    loads.broken.clear()
    use(cache, (0, 3), (0, 0), (1, 0))
    cache.close()


def test_a_wrong_prediction_that_cannot_be_loaded_disturbs_nobody():
    loads = Loads()
    loads.go.set()
    loads.broken = {(0, 3)}
    cache = make(30, loads, background=True)
    cache.begin([], [(0, 3)])
    use(cache, (1, 0), (0, 1))
    cache.close()
