"""The cache keeps to its budget, drops the least recently used, and survives failures and threads."""

import random
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, KptError
from kpt_moe.offload import ExpertCache
from kpt_moe.offload.cache import bytes_of
from kpt_moe.offload.transfer import ExpertWeights

SIZES = (10, 30)


def weights(key: tuple[int, int]) -> ExpertWeights:
    return ExpertWeights({"w": torch.tensor(key)})


def make(budget: int, load=weights) -> ExpertCache:
    return ExpertCache(budget, load, SIZES, ("first", "second"))


def use(cache: ExpertCache, *keys: tuple[int, int]) -> None:
    for key in keys:
        cache.begin([key])
        with cache.use(key) as held:
            assert held.parameters["w"].tolist() == list(key)


def run_all(*targets) -> None:
    """Threads that must all end."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert errors == []


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


def test_what_is_in_use_is_not_dropped():
    cache = make(30)
    waited = []

    def other():
        with cache.use((1, 1)):
            waited.append(cache.used)

    with cache.use((0, 0)) as held:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(0.2)
        assert waited == []
        assert held.parameters["w"].tolist() == [0, 0]
    thread.join(60)
    assert waited == [30]


def test_ahead_of_need_nothing_is_dropped_that_the_call_touched():
    cache = make(30)
    use(cache, (0, 0), (0, 1))
    call, there = cache.begin([(0, 1), (0, 2)])
    assert there == [True, False]
    cache.load_ahead((0, 2), call, predicted=False)
    assert cache.used == 30
    cache.load_ahead((0, 3), call, predicted=True)  # takes the place of (0, 0)
    assert cache.begin([(0, 0), (0, 1), (0, 2), (0, 3)])[1] == [False, True, True, True]
    cache.load_ahead((0, 4), call, predicted=True)
    assert cache.begin([(0, 4)])[1] == [False]
    count = cache.statistics[0]
    assert (count.loaded_ahead, count.loaded_ahead_used, count.evictions) == (1, 1, 1)


def test_a_failed_load_names_the_expert_and_the_cache_goes_on():
    broken = {(0, 3)}

    def load(key):
        if key in broken:
            raise OSError("no such sector")
        return weights(key)

    cache = make(30, load)
    use(cache, (0, 0))
    for _ in range(2):
        with pytest.raises(KptError, match="expert 3 of 'first' could not be loaded: no such sector") as raised:
            use(cache, (0, 3))
        assert isinstance(raised.value.__cause__, OSError)
    assert cache.used == 10
    broken.clear()
    use(cache, (0, 3), (0, 0), (1, 0))


def use_3(cache: ExpertCache) -> None:
    with cache.use((0, 3)):
        pass


@pytest.mark.parametrize("surface", [use_3, lambda cache: cache.begin([(0, 1)])], ids=["its use", "the next call"])
def test_a_load_that_failed_in_the_background_is_raised_once(surface):
    broken = {(0, 3)}

    def load(key):
        if key in broken:
            raise OSError("no such sector")
        return weights(key)

    cache = make(30, load)
    call, _ = cache.begin([(0, 3)])
    cache.load_ahead((0, 3), call, predicted=True)
    broken.clear()
    with pytest.raises(KptError, match="expert 3 of 'first' could not be loaded: no such sector"):
        surface(cache)
    use(cache, (0, 1), (0, 3))


def test_who_waits_for_a_load_that_fails_hears_of_it():
    loading, fail = threading.Event(), threading.Event()

    def load(key):
        loading.set()
        assert fail.wait(60)
        raise OSError("no such sector")

    cache = make(30, load)
    call, _ = cache.begin([(0, 3)])

    def background():
        cache.load_ahead((0, 3), call, predicted=False)

    def caller():
        assert loading.wait(60)
        threading.Timer(0.05, fail.set).start()
        with pytest.raises(KptError, match="expert 3"), cache.use((0, 3)):
            pass

    run_all(background, caller)
    assert cache.used == 0


def test_an_exception_while_an_expert_is_held_lets_it_go():
    cache = make(30)
    with pytest.raises(ZeroDivisionError), cache.use((1, 0)):
        _ = 1 / 0
    use(cache, (1, 1))


@pytest.mark.parametrize("budget", [30, 50])
def test_many_threads(budget):
    most, lock = [0], threading.Lock()

    def load(key):
        with lock:
            most[0] = max(most[0], cache.used)
        return weights(key)

    cache = make(budget, load)

    def work(seed):
        draw = random.Random(seed)
        for i in range(150):
            keys = [(draw.randrange(2), draw.randrange(5)) for _ in range(3)]
            call, _ = cache.begin(keys)
            if i % 3 == 0:
                cache.load_ahead(keys[2], call, predicted=True)
            for key in keys:
                with cache.use(key) as held:
                    assert held.parameters["w"].tolist() == list(key)

    run_all(*(lambda seed=seed: work(seed) for seed in range(6)))
    assert most[0] <= budget
    assert sum(count.hits + count.misses for count in cache.statistics) == 6 * 150 * 3
    cache.clear()
    assert cache.used == 0
