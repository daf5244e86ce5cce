"""The short path of dispatch is short. Times are printed and not judged: machines are noisy."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

import pytest
from torch import Tensor

import kpt_core
from kpt_core import Backend
from loopback import Loopback, first, kernel, scale

Add = Callable[[Backend], Backend]
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_dispatch.py"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_dispatch", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_dispatch", module)
    spec.loader.exec_module(module)
    return module


def python_calls(call: Callable[[], object]) -> list[str]:
    """Names of the Python functions that a call enters."""
    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]  # without `call` itself


def test_the_short_path_enters_two_functions_before_the_kernel(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    scale(x, x)
    for call in (lambda: scale(x, x), lambda: scale(x, x, factor=2.0), lambda: scale(x, weight=x)):
        assert python_calls(call) == ["Op.__call__", "is_dynamo_compiling", "first"]
    assert python_calls(lambda: first(x, x)) == ["first"]


def test_the_reference_alone_is_on_the_short_path_too(x: Tensor) -> None:
    scale(x, x)
    assert python_calls(lambda: scale(x, x)) == ["Op.__call__", "is_dynamo_compiling", "scale"]


def test_each_dtype_has_its_own(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", dtypes={"float32"})))
    scale(x, x)
    assert len(python_calls(lambda: scale(x.double(), x))) > 3
    assert python_calls(lambda: scale(x.double(), x))[-1] == "scale"
    assert python_calls(lambda: scale(x, x))[-1] == "first"


def test_a_kernel_that_may_refuse_is_asked_and_searched_for_no_more(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    scale(x, x)
    entered = python_calls(lambda: scale(x, x))
    assert "at_most_four_rows" in entered
    assert "find_candidates" not in entered
    assert "first" in entered


def test_median_overhead(benchmark_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every path runs and costs something; how much is printed."""
    found = benchmark_module.overheads(repeats=30)
    with capsys.disabled():
        print("\ndispatch, median microseconds:", {path: round(median, 2) for path, median in found.items()})
    assert found.keys() == benchmark_module.PATHS.keys()
    assert min(found.values()) > 0
    assert "bench" not in kpt_core.backends()
