"""`counts` and `observe` see the calls of a whole process: every thread, eager and compiled code, failures too."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, KernelCount, Selection
from loopback import Fault, Loopback, kernel, scale, shifted

Add = Callable[[Backend], Backend]
FIRST = "loop/sample.scale/loopback:first"
FAULTY = "loop/sample.scale/loopback:faulty"


@pytest.fixture(autouse=True)
def from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the calls of other tests, which are in the same process."""
    for op in kpt_core.ops().values():
        for count in op.counts.values():
            monkeypatch.setattr(count, "calls", 0)
            monkeypatch.setattr(count, "failures", 0)


def counted() -> dict[str, tuple[int, int, bool]]:
    return {each.identity: (each.calls, each.failures, each.quarantined) for each in kpt_core.counts()}


def in_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_every_eager_call_is_counted_once(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", backward="backward")))
    assert kpt_core.counts() == ()
    leaf = x.clone().requires_grad_()
    for argument in (x, x, leaf, leaf):  # each first searched for, then the short way
        scale(argument, x)
    scale(leaf, x).sum().backward()
    with kpt_core.use("loop"):
        scale(x, x)
    torch.func.grad(lambda t: scale(t, x).sum())(x)
    kpt_core.explain(scale, x, x)
    assert kpt_core.counts() == (KernelCount("sample.scale", "loop", FIRST, calls=7),)


def test_the_reference_is_counted_too(x: Tensor) -> None:
    for _ in range(3):
        scale(x, x)
    assert kpt_core.counts() == (KernelCount("sample.scale", "reference", "reference", calls=3),)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_code_counts_when_it_runs(add: Add, fresh_compiler: None, compiler: str, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    compiled = torch.compile(lambda t: scale(t, t) + 1, backend=compiler, fullgraph=True)
    for _ in range(3):
        compiled(x)
    assert counted() == {FIRST: (3, 0, False)}


def test_calls_of_all_threads_are_counted_and_the_rest_is_a_snapshot(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    scale(x, x)
    before = kpt_core.counts()
    in_another_thread(lambda: scale(x, x))
    assert counted() == {FIRST: (2, 0, False)}
    assert before[0].calls == 1


def test_a_failure_is_counted_where_it_happened_and_the_call_where_it_was_served(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", priority=1), kernel("first")))
    scale(x, x)
    Fault.error = RuntimeError("no launch")
    for place in range(4):  # three times it is tried
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kpt_core.KernelFailedWarning)
            scale(x, x)
        assert counted()[FAULTY] == (1, min(place + 1, 3), place >= 2)
    assert counted()[FIRST] == (4, 0, False)
    kpt_core.refresh()  # ends quarantine; counts are of the process
    assert counted() == {FAULTY: (1, 3, False), FIRST: (4, 0, False)}


def test_what_a_wrong_call_raises_is_no_failure(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    with pytest.raises(RuntimeError):
        scale(x, torch.ones(3))
    assert kpt_core.counts() == ()


def test_an_observer_is_told_of_every_thread_and_of_nothing_once_closed(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    scale(x, x)  # the short way is there before it listens
    told: list[Selection] = []
    with kpt_core.observe(told.append), kpt_core.record() as log:
        scale(x, x)
        in_another_thread(lambda: (scale(x, x), scale(x, x)))
    assert [each.identity for each in told] == [FIRST] * 3
    assert told[0] is log[0]  # all that `record` tells
    assert len(log) == 1
    scale(x, x)
    in_another_thread(lambda: scale(x, x))
    assert len(told) == 3
    assert counted() == {FIRST: (6, 0, False)}


def test_an_observer_is_told_of_parts_before_the_whole(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), kernel("parts", "sample.shifted", composed_of=("sample.scale",))))
    told: list[Selection] = []
    with kpt_core.observe(told.append):
        shifted(x)
    assert [each.op for each in told] == ["sample.scale", "sample.shifted"]
    assert told[1].children == (told[0],)


def test_an_observer_is_told_of_compiled_code(add: Add, fresh_compiler: None, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    compiled = torch.compile(lambda t: scale(t, t) + 1, backend="eager", fullgraph=True)
    compiled(x)
    told: list[Selection] = []
    with kpt_core.observe(told.append):
        compiled(x)
    assert [each.identity for each in told] == [FIRST]


def test_a_callback_that_raises_breaks_no_call_and_is_not_called_again(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    expected = scale(x, x)
    calls: list[Selection] = []
    told: list[Selection] = []

    def raising(selection: Selection) -> None:
        calls.append(selection)
        raise ValueError("disk full")

    with kpt_core.observe(raising), kpt_core.observe(told.append):
        with pytest.warns(kpt_core.KptWarning, match="raised ValueError: disk full; it is not called again"):
            result = scale(x, x)
        scale(x, x)  # warnings are errors here
    torch.testing.assert_close(result, expected)
    assert len(calls) == 1
    assert len(told) == 2
    assert counted() == {FIRST: (3, 0, False)}


def test_the_short_way_is_back_once_nobody_listens(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    with kpt_core.observe(lambda selection: None):
        scale(x, x)
        assert not scale.quick
    scale(x, x)
    assert scale.quick


def test_an_observer_cant_be_opened_in_compiled_code(fresh_compiler: None, x: Tensor) -> None:
    def listen(t: Tensor) -> Tensor:
        with kpt_core.observe(print):
            return t + 1

    with pytest.raises(Exception, match=r"observe\(\) can't be opened inside a compiled function"):
        torch.compile(listen, backend="eager", fullgraph=True)(x)
