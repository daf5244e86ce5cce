"""The short path of dispatch is short: what a call enters is counted, for times differ from machine to machine."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend
from loopback import Loopback, kernel, scale

Add = Callable[[Backend], Backend]
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_dispatch.py"
#: What looks for kernels, which is done once.
SEARCH = {"find_candidates", "tuned_choices", "kernels", "backends", "_load", "choose_and_run", "choose", "effective"}
#: Functions that a call may enter before its kernel.
MOST = 4


def python_calls(call: Callable[[], object]) -> list[str]:
    """Names of the Python functions that a call enters."""
    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]  # without `call` itself


def test_the_short_path_enters_few_functions_before_the_kernel(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", backward="backward")))
    scale(x, x)
    for call in (lambda: scale(x, x), lambda: scale(x, x, factor=2.0), lambda: scale(x, weight=x)):
        entered = python_calls(call)
        assert len(entered) <= MOST + 1, entered
        assert not SEARCH & set(entered)


def test_a_kernel_that_may_refuse_is_asked_and_searched_for_no_more(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("second", unsupported="at_most_four_rows", priority=1), kernel("first", backward="backward")))
    for rows in (x, torch.ones(5)):
        scale(rows, rows)
        entered = python_calls(lambda rows=rows: scale(rows, rows))
        assert "at_most_four_rows" in entered
        assert len(entered) <= MOST + 5, entered
        assert not SEARCH & set(entered)


def test_training_searches_no_more_either(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", backward="backward")))
    leaf = x.clone().requires_grad_()
    scale(leaf, x)
    entered = python_calls(lambda: scale(leaf, x))
    assert not SEARCH & set(entered)
    assert "attach" in entered


def test_each_dtype_has_its_own(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", dtypes={"float32"}, backward="backward"), kernel("second", backward="backward")))
    double = x.double()
    for argument in (x, double):
        assert "find_candidates" in python_calls(lambda argument=argument: scale(argument, argument))
    for argument in (x, double, x):
        assert not SEARCH & set(python_calls(lambda argument=argument: scale(argument, argument)))


def test_a_block_searches_once(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), kernel("second")))
    with kpt_core.use("loopback:second"):
        assert "find_candidates" in python_calls(lambda: scale(x, x))
        assert "find_candidates" not in python_calls(lambda: scale(x, x))
    scale(x, x)
    with kpt_core.use("loopback:second"):
        assert "find_candidates" not in python_calls(lambda: scale(x, x))


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_dispatch", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_dispatch", module)
    monkeypatch.setattr(kpt_core.registry, "_ops", dict(kpt_core.registry._ops))
    spec.loader.exec_module(module)
    yield module
    assert "bench" not in kpt_core.backends()


def test_the_benchmark_runs_every_path(benchmark_module: ModuleType) -> None:
    paths: dict[str, tuple[Callable[[], AbstractContextManager[None]], ...]] = benchmark_module.PATHS
    assert benchmark_module.overheads(repeats=1).keys() == paths.keys()
