"""Several threads: scopes are each thread's own, kernels and caches are shared."""

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, _registry
from loopback import Loopback, hundreds, kernel, scale
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


def test_concurrent_first_calls_discover_and_agree(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def discover(group: str) -> tuple[()]:
        asked.append(group)
        return ()

    monkeypatch.setattr(_registry, "entry_points", discover)
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
        assert set(asked) == {"kpt.backends"}


def test_a_backend_removed_by_one_thread_is_gone_for_all(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    assert hundreds(in_another_thread(lambda: scale(x, x))) == 1
    kpt_core.remove_backend("loop")
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
    meeting.point = lambda: (importing.set(), discovering.wait(30))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registry, "entry_points", find)
    monkeypatch.setattr(_registry, "_ops", dict(_registry._ops))
    monkeypatch.setattr(_registry, "_lock", threading.RLock())  # threads that hang keep it
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
    assert kpt_core.problems() == ()


def test_an_op_that_a_plug_in_calls_while_it_is_imported_is_served_anew_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = GOOD + "\nimport torch\nassert double(torch.ones(1))[0] == 2\n"
    install(tmp_path, "plug_eager", calls)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registry, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(_registry, "_ops", dict(_registry._ops))
    assert list(kpt_core.backends()) == ["plug_eager"]
    assert hundreds(kpt_core.get_op("plugin.double")(torch.ones(1))) == 1
    sys.modules.pop("plug_eager")
