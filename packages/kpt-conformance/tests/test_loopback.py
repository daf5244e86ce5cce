"""The loopback backend takes part in dispatch as an installed one does: no hardware, every answer settable."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_conformance.loopback import Loopback
from kpt_core import (
    Call,
    KernelFailedWarning,
    NoKernelError,
    PluginWarning,
    Refusal,
    RegistrationError,
    UnknownNameError,
)

WORKERS = 8


@kpt_core.op("loopback.scaled")
def scaled(x: Tensor, *, factor: float = 1.0) -> Tensor:
    """A kernel adds a hundred times its number, which tells who ran."""
    return x * factor


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    kpt_core.refresh()
    yield
    monkeypatch.undo()
    kpt_core.refresh()


def adding(number: int):
    def kernel(call: Call) -> Tensor:
        return call.x * call.factor + 100 * number

    return kernel


def scaling_back(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    return {"x": grad * call.factor}


def raising(error: Exception):
    def kernel(call: Call) -> Tensor:
        raise error

    return kernel


def served(rows: int = 2) -> int:
    return int(scaled(torch.ones(rows))[0]) // 100


def reasons() -> list[str]:
    return [refusal.reason for refusal in scaled.explain(torch.ones(2)).refusals if refusal.backend == "loopback"]


def test_it_is_a_backend_with_the_given_answers() -> None:
    loopback = Loopback("mine", "cuda", {"bf16"}, "no driver")
    assert isinstance(loopback, kpt_core.Backend)
    assert (loopback.name, loopback.device_types, loopback.unavailable(), loopback.ready) == (
        "mine",
        ("cuda",),
        "no driver",
        False,
    )
    assert loopback.capabilities(torch.device("cuda:0")) == {"bf16"}
    assert list(loopback.kernels()) == []


def test_kernels_serve_inside_the_block_alone() -> None:
    loopback = Loopback()
    kernel = loopback.offer("loopback.scaled", adding(1))
    assert served() == 0
    with loopback as entered:
        assert entered is loopback
        assert served() == 1
        assert scaled.explain(torch.ones(2)).kernel == kernel.forward
        assert kpt_core.backends()["loopback"] is loopback
    assert served() == 0
    assert "loopback" not in kpt_core.backends()


def test_the_block_is_left_when_it_raises() -> None:
    with pytest.raises(ZeroDivisionError), Loopback():
        raise ZeroDivisionError
    assert "loopback" not in kpt_core.backends()


def test_what_is_offered_inside_the_block_serves_the_next_call() -> None:
    with Loopback() as loopback:
        assert served() == 0
        loopback.offer("loopback.scaled", adding(1))
        assert served() == 1
        loopback.offer("loopback.scaled", adding(2), priority=5)
        assert served() == 2
        loopback.offer("loopback.scaled", adding(3), priority=1)
        assert served() == 2


def test_names_are_unique_even_of_one_function() -> None:
    function = adding(1)
    kernels = [Loopback(name).offer("loopback.scaled", function) for name in ("one", "one", "two")]
    assert len({kernel.forward for kernel in kernels}) == 3
    assert len({Loopback().offer("loopback.scaled", lambda call: call.x).forward for _ in range(3)}) == 3
    with Loopback("one") as one, Loopback("two") as two:
        first, second = (backend.offer("loopback.scaled", adding(n)) for n, backend in ((1, one), (2, two)))
        with kpt_core.use(first.forward):
            assert served() == 1
        with kpt_core.use(second.forward):
            assert served() == 2


def test_two_of_one_name_cannot_be_there_at_once() -> None:
    with Loopback(), pytest.raises(RegistrationError, match="backend 'loopback' exists already"):
        Loopback().__enter__()


def test_everything_that_a_kernel_declares_arrives() -> None:
    kernel = Loopback().offer(
        "loopback.scaled",
        adding(1),
        scaling_back,
        requires=["tma"],
        priority=7,
        dtypes=["torch.bfloat16"],
        unsupported=lambda call: None,
        deterministic=True,
        configs=[{"block": 16}],
    )
    assert (kernel.op, kernel.requires, kernel.priority, kernel.dtypes) == (
        "loopback.scaled",
        {"tma"},
        7,
        {"bfloat16"},
    )
    assert kernel.deterministic
    for target, name in ((kernel.forward, "kernel_"), (kernel.backward, "scaling_back_"), (kernel.configs, "list_")):
        assert target.startswith(f"kpt_conformance.loopback:offered.{name}")


def test_a_breakdown_and_its_repair_are_seen_at_once() -> None:
    with Loopback() as loopback:
        loopback.offer("loopback.scaled", adding(1))
        assert served() == 1
        loopback.broken = "the fan stands still"
        assert (served(), reasons(), loopback.ready) == (0, ["the fan stands still"], False)
        loopback.ready = True
        assert (served(), loopback.broken) == (1, None)
        loopback.ready = False
        assert (served(), reasons()) == (0, ["loopback is not ready"])


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"requires": {"tma", "bf16"}}, "needs tma, which cpu lacks"),
        ({"dtypes": {"bfloat16"}}, "dtype float32; needs bfloat16"),
        ({"unsupported": lambda call: f"{len(call.x)} rows; takes one"}, "2 rows; takes one"),
        ({"unsupported": lambda call: Refusal("{n} rows; takes one", n=len(call.x))}, "2 rows; takes one"),
    ],
)
def test_refusals_are_sentences(declared, reason: str) -> None:
    with Loopback(capabilities={"bf16"}) as loopback:
        loopback.offer("loopback.scaled", adding(1), priority=9, **declared)
        loopback.offer("loopback.scaled", adding(2), requires={"bf16"})
        assert (served(), reasons()) == (2, [reason])


def test_another_device_s_kernels_are_refused() -> None:
    with Loopback(device_type="cuda") as loopback:
        loopback.offer("loopback.scaled", adding(1))
        assert (served(), reasons()) == (0, ["runs on cuda; this call is on cpu"])


def test_a_kernel_without_backward_is_refused_where_a_gradient_is_needed() -> None:
    with Loopback() as loopback:
        loopback.offer("loopback.scaled", adding(1))
        x = torch.ones(2, requires_grad=True)
        assert int(scaled(x)[0]) == 1
        with torch.no_grad():
            assert int(scaled(x)[0]) == 101
        scaled(x).sum().backward()
        assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("offered", [{"backward": scaling_back}, {"differentiable": True}])
def test_gradients_pass_through_a_kernel(offered) -> None:
    with Loopback() as loopback:
        loopback.offer("loopback.scaled", adding(1), **offered)
        x = torch.ones(2, requires_grad=True)
        out = scaled(x, factor=3.0)
        assert out.tolist() == [103, 103]
        out.sum().backward()
        assert x.grad.tolist() == [3, 3]


def test_a_kernel_that_takes_the_arguments_one_by_one_is_refused() -> None:
    with Loopback() as loopback:
        kernel = loopback.offer("loopback.scaled", lambda x, factor: x)
        with pytest.warns(PluginWarning, match=rf"{kernel.forward} must take 1 argument"):
            assert served() == 0
        (reason,) = reasons()
        assert "could not be loaded" in reason


def test_a_broken_kernel_is_quarantined_after_three_failures() -> None:
    with Loopback() as loopback:
        calls: list[int] = []

        def broken(call: Call) -> Tensor:
            calls.append(len(call.x))
            raise RuntimeError("no launch")

        loopback.offer("loopback.scaled", broken, priority=9)
        loopback.offer("loopback.scaled", adding(2))
        for rows in (2, 2, 3):
            with pytest.warns(KernelFailedWarning, match="raised RuntimeError: no launch;"):
                assert served(rows=rows) == 2
        assert (served(rows=2), calls) == (2, [2, 2, 3])
        assert reasons() == ["quarantined: it raised 3 times, lastly RuntimeError: no launch"]


def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with Loopback() as loopback:
        loopback.offer("loopback.scaled", raising(RuntimeError("no launch")))
        with kpt_core.use(strict=True), pytest.raises(RuntimeError, match="no launch"):
            served()
        monkeypatch.setenv("KPT_STRICT", "1")
        kpt_core.refresh()
        with pytest.raises(RuntimeError, match="no launch"):
            served()


def test_what_is_asked_for_runs_or_raises() -> None:
    with Loopback() as loopback, Loopback("other", capabilities={"tma"}) as other:
        loopback.offer("loopback.scaled", adding(1), requires={"tma"})
        other.offer("loopback.scaled", adding(2))
        with kpt_core.use("other"):
            assert served() == 2
        with kpt_core.use("reference"):
            assert served() == 0
        with kpt_core.use("loopback"), pytest.raises(NoKernelError) as caught:
            served()
        assert "needs tma, which cpu lacks" in str(caught.value)
        assert "loopback was asked for" in str(caught.value)
    with pytest.raises(UnknownNameError, match="unknown backend or kernel 'loopback'"), kpt_core.use("loopback"):
        pytest.fail("the block must not be entered")


@pytest.mark.parametrize(
    ("variable", "value", "number"),
    [
        ("KPT_USE", "other", 2),
        ("KPT_USE", "reference", 0),
        ("KPT_USE", "loopback.scaled=other", 2),
        ("KPT_USE", "", 1),
        ("KPT_DISABLE", "loopback", 2),
        ("KPT_DISABLE", "loopback,other", 0),
    ],
)
def test_the_environment_is_obeyed(variable: str, value: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Loopback() as loopback, Loopback("other") as other:
        loopback.offer("loopback.scaled", adding(1), priority=1)
        other.offer("loopback.scaled", adding(2))
        monkeypatch.setenv(variable, value)
        kpt_core.refresh()
        assert served() == number


def test_a_kernel_s_name_works_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Loopback() as loopback:
        kernels = [loopback.offer("loopback.scaled", adding(n), priority=-n) for n in (1, 2)]
        monkeypatch.setenv("KPT_USE", kernels[1].forward)
        kpt_core.refresh()
        assert served() == 2
        monkeypatch.setenv("KPT_USE", "")
        monkeypatch.setenv("KPT_DISABLE", kernels[0].forward)
        kpt_core.refresh()
        assert served() == 2


def test_compiled_code_runs_the_kernel() -> None:
    with Loopback() as loopback:
        loopback.offer("loopback.scaled", adding(1))
        compiled = torch.compile(lambda x: scaled(x, factor=2.0), fullgraph=True, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [102, 102]
    assert compiled(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:kernel .* raised LaunchError:kpt_core.KernelFailedWarning")
def test_backends_come_and_go_while_eight_threads_dispatch() -> None:
    """Every result is some kernel's or the reference's, whole, and of one that was there; and nothing raises."""

    class LaunchError(RuntimeError):
        pass

    stop = threading.Event()
    meet = threading.Barrier(WORKERS + 1)

    def refuses_odd(call: Call) -> str | None:
        return "an odd number of rows" if len(call.x) % 2 else None

    def dispatch(worker: int) -> tuple[int, set[int]]:
        chance, seen, calls = random.Random(worker), set[int](), 0
        meet.wait(30)
        while not stop.is_set():
            rows = chance.randint(1, 4)
            result = scaled(torch.full((rows,), float(worker)), factor=2.0).tolist()
            number, rest = divmod(int(result[0]), 100)
            assert result == [100 * number + 2 * worker] * rows
            assert rest == 2 * worker
            assert number in (0, 1, 2, 3)
            assert not (number == 2 and rows % 2), "refused, and ran nevertheless"
            seen.add(number)
            calls += 1
        return calls, seen

    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(dispatch, worker) for worker in range(WORKERS)]
        meet.wait(30)
        try:
            chance = random.Random(0)
            for _ in range(20):
                with Loopback("first") as first, Loopback("second") as second:
                    first.offer("loopback.scaled", adding(1), priority=chance.randint(0, 3))
                    time.sleep(0.002)  # let the others run
                    assert served() == 1
                    second.offer("loopback.scaled", adding(2), priority=5, unsupported=refuses_odd)
                    time.sleep(0.002)
                    assert (served(1), served(2)) == (1, 2)
                    second.broken = "for a moment"
                    time.sleep(0.002)
                    assert served(2) == 1
                    second.ready = True
                    if chance.random() < 0.3:
                        first.offer("loopback.scaled", raising(LaunchError("no launch")), priority=9)
                    second.offer("loopback.scaled", adding(3), priority=4)
                    time.sleep(0.002)
                    assert (served(1), served(2)) == (3, 2)
                    if chance.random() < 0.2:
                        kpt_core.refresh()
                time.sleep(0.002)
                assert served() == 0
        finally:
            stop.set()
        outcomes = [future.result(60) for future in running]
    assert min(calls for calls, _ in outcomes) > 0
    assert set().union(*(seen for _, seen in outcomes)) == {0, 1, 2, 3}
    assert served() == 0


def test_a_choice_that_began_before_a_change_is_not_kept() -> None:
    asking, answer = threading.Event(), threading.Event()

    class Slow(Loopback):
        def capabilities(self, device: torch.device) -> frozenset[str]:
            if threading.current_thread() is not threading.main_thread():
                asking.set()
                answer.wait(30)
            return super().capabilities(device)

    with Slow() as slow, ThreadPoolExecutor(1) as pool:
        slow.offer("loopback.scaled", adding(1))
        before = pool.submit(served)
        assert asking.wait(30)
        with Loopback("late") as late:
            late.offer("loopback.scaled", adding(2), priority=1)
            answer.set()
            before.result(30)
            assert [served(), pool.submit(served).result(30)] == [2, 2]
