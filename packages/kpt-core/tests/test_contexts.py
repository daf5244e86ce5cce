"""Threads and asyncio tasks: settings are each one's own, kernels and caches are shared."""

import asyncio
import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, discovery, registry
from loopback import Fault, Loopback, hundreds, kernel, scale
from plugins import GOOD, entry_points_in, install

Add = Callable[[Backend], Backend]
WORKERS = 8


def in_another_thread(call: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_use_in_one_thread_leaves_the_others_alone(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))
    with kpt_core.use("loopback:second"):
        assert hundreds(scale(x, x)) == 2
        assert hundreds(in_another_thread(lambda: scale(x, x))) == 1
    assert hundreds(scale(x, x)) == 1


def test_record_in_one_thread_does_not_hear_the_others(x: Tensor) -> None:
    with kpt_core.record() as log:
        in_another_thread(lambda: scale(x, x))
        assert log == []
        scale(x, x)
    assert [selection.op for selection in log] == ["sample.scale"]


def test_concurrent_uses_each_get_their_own(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), kernel("second"), kernel("third")))
    meet = threading.Barrier(3)

    def served(attribute: str) -> set[int]:
        with kpt_core.use(f"loopback:{attribute}"):
            meet.wait(30)
            return {hundreds(scale(x, x)) for _ in range(50)}

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(served, ("first", "second", "third"))) == [{1}, {2}, {3}]


def test_overlapping_blocks_of_asyncio_tasks_are_each_task_s_own(add: Add, x: Tensor) -> None:
    """Opened and closed in turn, which a stack for the whole thread would mix up."""
    add(Loopback(kernel("first", priority=1), kernel("second")))

    async def overlap() -> list[list[int]]:
        opened, closed = asyncio.Event(), asyncio.Event()
        seen: list[list[int]] = [[], []]

        async def early() -> None:
            with kpt_core.use("reference"), kpt_core.record() as log:
                await opened.wait()
                seen[0].append(hundreds(scale(x, x)))
                assert [each.kernel for each in log] == ["reference"]
            closed.set()
            seen[0].append(hundreds(scale(x, x)))

        async def late() -> None:
            with kpt_core.use("loopback:second"):
                opened.set()
                await closed.wait()  # the other one is closed before this one
                seen[1].append(hundreds(scale(x, x)))
            seen[1].append(hundreds(scale(x, x)))

        await asyncio.gather(early(), late())
        return seen

    assert asyncio.run(overlap()) == [[0, 1], [2, 1]]
    assert hundreds(scale(x, x)) == 1


def test_tasks_that_begin_inside_a_block_are_inside_it(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))

    async def task() -> int:
        await asyncio.sleep(0)
        return hundreds(scale(x, x))

    async def run() -> None:
        with kpt_core.use("loopback:second"), kpt_core.record() as log:
            begun = [asyncio.create_task(task()) for _ in range(3)]
        assert [await each for each in begun] == [2, 2, 2]
        assert len(log) == 3
        assert await task() == 1
        assert await asyncio.to_thread(lambda: hundreds(scale(x, x))) == 1

    asyncio.run(run())


def test_concurrent_compiled_calls_each_have_their_own_block(add: Add, x: Tensor, fresh_compiler: None) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second"), kernel("third")))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    assert hundreds(compiled(x)) == 1
    meet = threading.Barrier(3)

    def served(attribute: str) -> set[int]:
        with kpt_core.use(f"loopback:{attribute}"):
            meet.wait(30)
            return {hundreds(compiled(x)) for _ in range(20)}

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(served, ("first", "second", "third"))) == [{1}, {2}, {3}]


def test_a_kernel_that_raises_in_many_threads_at_once_is_contained_in_each(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", priority=1), kernel("second")))
    Fault.error = RuntimeError("no launch")
    meet = threading.Barrier(WORKERS)

    def call(worker: int) -> int:
        meet.wait(30)
        return hundreds(scale(x, x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ThreadPoolExecutor(WORKERS) as pool:
            assert list(pool.map(call, range(WORKERS))) == [2] * WORKERS
    assert 1 <= Fault.calls <= WORKERS


def test_concurrent_first_calls_discover_and_agree(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def discover(group: str) -> tuple[()]:
        asked.append(group)
        return ()

    monkeypatch.setattr(discovery, "entry_points", discover)
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second")))
    meet = threading.Barrier(WORKERS)

    def call(worker: int) -> int:
        rows = torch.ones(4 if worker % 2 else 5)
        meet.wait(30)
        return hundreds(scale(rows, rows))

    for _ in range(20):
        kpt_core.refresh()
        asked.clear()
        with ThreadPoolExecutor(WORKERS) as pool:
            assert list(pool.map(call, range(WORKERS))) == [2, 1] * (WORKERS // 2)
        assert set(asked) == {"kpt.backends", "kpt.ops", "kpt.policies"}


def test_a_backend_removed_by_one_thread_is_gone_for_all(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    assert hundreds(in_another_thread(lambda: scale(x, x))) == 1
    registry.remove_backend("loop")
    assert hundreds(in_another_thread(lambda: scale(x, x))) == 0
    assert hundreds(scale(x, x)) == 0


def test_backward_in_this_thread_sees_its_scope(add: Add) -> None:
    """On the CPU autograd runs backward in the thread that asks for it."""
    add(Loopback(kernel("first")))
    seen: list[int] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            result = scale(grad, grad)
            seen.append(hundreds(result))
            return result

    out = Doubled.apply(torch.ones(4, requires_grad=True)).sum()
    with kpt_core.use("reference"):
        out.backward()
    assert seen == [0]


def test_discovery_waits_for_no_thread_that_imports_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread holds the module's import lock and defines an op; the other one discovers, and imports the module."""
    importing, discovering = threading.Event(), threading.Event()

    def find(group: str) -> list[EntryPoint]:
        discovering.set()
        return entry_points_in(tmp_path, group)

    install(tmp_path, "plug_slow", "import meeting; meeting.point()\n" + GOOD, "kpt.ops", plug_slow="plug_slow:OPS")
    meeting = ModuleType("meeting")
    meeting.point = lambda: (importing.set(), discovering.wait(30))
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", find)
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    monkeypatch.setattr(registry, "_lock", threading.RLock())  # threads that hang keep it
    importer = threading.Thread(target=importlib.import_module, args=("plug_slow",), daemon=True)
    importer.start()
    assert importing.wait(30)
    found: list[str] = []
    finder = threading.Thread(target=lambda: found.extend(kpt_core.ops()), daemon=True)
    finder.start()
    for thread in (importer, finder):
        thread.join(10)
    sys.modules.pop("plug_slow", None)
    assert "plugin.double" in found
    assert registry.problems() == ()


def test_an_op_that_a_plug_in_calls_while_it_is_imported_is_served_anew_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = GOOD + "\nimport torch\nassert double(torch.ones(1))[0] == 2\n"
    install(tmp_path, "plug_eager", calls)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    assert list(kpt_core.backends()) == ["plug_eager", "torch"]
    assert hundreds(kpt_core.get_op("plugin.double")(torch.ones(1))) == 1
    sys.modules.pop("plug_eager")
