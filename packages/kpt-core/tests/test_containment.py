"""A kernel that raises is contained: the next one runs, and after three failures it is off."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kpt_core
import toy_ops
from kpt_core import Backend, InputError, KernelFailedWarning, NoKernelError, registry
from loopback import Fault, Loopback, hundreds, kernel, scale
from toy_cases import TABLES

Add = Callable[[Backend], Backend]


@pytest.fixture(params=[None, "never_refuses"], ids=["unconditional", "conditional"], autouse=True)
def backend(request: pytest.FixtureRequest, add: Add) -> Backend:
    """`faulty` before `second`, where refusals are asked for and where they aren't."""
    faulty = kernel("faulty", backward="faulty_backward", unsupported=request.param, priority=5)
    return add(Loopback(faulty, kernel("second", backward="second_backward")))


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
def warm(request: pytest.FixtureRequest, x: Tensor) -> bool:
    """Whether the kernel served such calls before, which opens the short path."""
    if request.param:
        assert [hundreds(scale(x, x)) for _ in range(2)] == [5, 5]
    Fault.calls = 0
    return bool(request.param)


def fail_once(x: Tensor) -> None:
    Fault.error = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning):
        scale(x, x)


def test_the_next_one_runs_with_a_warning(warm: bool, x: Tensor) -> None:
    Fault.error = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning) as warned:
        assert hundreds(scale(x, x)) == 2
    assert Fault.calls == 1
    assert [str(w.message) for w in warned] == [
        "kernel loopback:faulty raised RuntimeError: no launch; loopback:second ran sample.scale in its place; after "
        "3 failures it is off (KPT_STRICT=1 raises instead)"
    ]
    assert [w.filename for w in warned] == [__file__]


def test_a_failure_counts_and_does_not_keep_it_from_other_calls(warm: bool, x: Tensor) -> None:
    fail_once(x)
    Fault.error = None
    assert [hundreds(scale(t, t)) for t in (x, torch.ones(5), x.double(), x.clone().requires_grad_())] == [5, 5, 5, 5]


def test_after_three_failures_it_is_off_for_the_process(warm: bool) -> None:
    Fault.error = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning) as warned:  # noqa: PT031
        for rows in range(1, 1001):
            assert hundreds(scale(torch.ones(rows), torch.ones(rows))) == 2
    assert Fault.calls == len(warned) == 3
    Fault.error = None
    rows = torch.ones(2000)
    assert hundreds(scale(rows, rows)) == 2
    (refusal,) = kpt_core.explain(scale, rows, rows).refusals
    assert refusal.reason == "quarantined: it raised 3 times, lastly RuntimeError: no launch"
    kpt_core.refresh()
    assert hundreds(scale(rows, rows)) == 5


def test_it_stays_out_in_every_block(warm: bool, x: Tensor) -> None:
    for _ in range(3):
        fail_once(x)
    Fault.error = None
    with kpt_core.record() as log:
        scale(x, x)
    assert [selection.kernel for selection in log] == ["loopback:second"]
    with kpt_core.use("loopback:faulty"), pytest.raises(NoKernelError, match="lastly RuntimeError: no launch"):
        scale(x, x)


def test_the_reference_runs_when_all_kernels_raise(warm: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: kpt_core.Call) -> Tensor:
        raise OSError("second is broken too")

    monkeypatch.setattr("loopback.second", broken)
    kpt_core.refresh()
    Fault.error = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning) as warned:
        assert hundreds(scale(x, x)) == 0
    assert [str(w.message).partition(";")[0] for w in warned] == [
        "kernel loopback:faulty raised RuntimeError: no launch",
        "kernel loopback:second raised OSError: second is broken too",
    ]
    assert all("the reference ran" in str(w.message) for w in warned)


def test_strict_raises_the_kernel_s_error_with_a_note(
    warm: bool, x: Tensor, setting: Callable[[str, str], None]
) -> None:
    setting("KPT_STRICT", "1")
    if warm:
        scale(x, x)
    Fault.error = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch") as caught:
        scale(x, x)
    assert caught.value is Fault.error
    assert caught.value.__notes__ == ["raised by kernel loop/sample.scale/loopback:faulty"]
    Fault.error = None
    assert hundreds(scale(x, x)) == 5


@pytest.mark.parametrize("name", ["loop", "loopback:faulty"])
def test_an_explicit_choice_raises_the_kernel_s_error(warm: bool, x: Tensor, name: str) -> None:
    Fault.error = RuntimeError("no launch")
    with kpt_core.use(name):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no launch") as caught:
                scale(x, x)
            assert caught.value.__notes__.pop() == "raised by kernel loop/sample.scale/loopback:faulty"
    assert Fault.calls == 2


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("16 GiB"), MemoryError(), InputError("sample.other: wrong"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_are_not_the_kernel_s_pass_through(warm: bool, x: Tensor, error: BaseException) -> None:
    Fault.error = error
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            scale(x, x)
        assert caught.value is error
    Fault.error = None
    assert hundreds(scale(x, x)) == 5
    assert Fault.calls == 3


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_backend_that_leaves_while_its_kernel_fails(
    warm: bool, x: Tensor, replaced: bool, monkeypatch: pytest.MonkeyPatch, add: Add
) -> None:
    """Its error counts for its own kernel, and for no other that is the best one by then."""

    def leave(call: kpt_core.Call) -> Tensor:
        if not failing:
            return call.x + 500
        registry.remove_backend("loop")
        if replaced:
            add(Loopback(kernel("third"), name="new"))
        raise RuntimeError("no launch")

    failing = False
    monkeypatch.setattr("loopback.faulty", leave)
    kpt_core.refresh()
    for _ in range(2 * warm):
        scale(x, x)
    failing = True
    with pytest.warns(KernelFailedWarning, match="kernel loopback:faulty raised RuntimeError: no launch"):
        assert hundreds(scale(x, x)) in (2, 3 if replaced else 0)  # of what was there when the call began, or is now
    assert hundreds(scale(x, x)) == (3 if replaced else 0)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Rings of objects stay, as they do until Python looks for them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("scope", [nullcontext, kpt_core.record], ids=["short path", "block"])
def test_a_recomputation_that_ends_inside_the_kernel_leaves_no_tensors(
    warm: bool, x: Tensor, scope: Callable[[], AbstractContextManager[object]], no_collection: None
) -> None:
    """Else each block of a model would keep its activations, which checkpointing is to save."""
    made: list[weakref.ref[Tensor]] = []

    def block(t: Tensor) -> Tensor:
        inner = t * 2
        made.append(weakref.ref(inner))
        return scale(inner, t)

    with scope():
        for _ in range(3):
            out = checkpoint(block, x.clone().requires_grad_(), use_reentrant=False)
            assert isinstance(out, Tensor)
            out.sum().backward()
            del out
    assert len(made) == 6
    assert [each() for each in made] == [None] * 6


def test_a_wrong_call_leaves_no_tensors(warm: bool, x: Tensor, no_collection: None) -> None:
    wrong = torch.ones(3)
    gone = weakref.ref(wrong)
    Fault.error = OSError("invalid configuration argument")
    with contextlib.suppress(RuntimeError):
        scale(x, wrong)
    Fault.error = None
    del wrong
    assert gone() is None


@pytest.mark.parametrize("scope", [nullcontext, kpt_core.record], ids=["short path", "block"])
def test_activation_checkpointing_ends_the_recomputation_inside_the_kernel(
    warm: bool, x: Tensor, scope: Callable[[], AbstractContextManager[object]]
) -> None:
    """It raises where the last tensor is saved: nothing of this is the kernel's failure."""
    leaf = x.clone().requires_grad_()
    expected: Any = None
    with scope():
        for recompute in (False, True, True):
            leaf.grad = None
            twice: Callable[[Tensor], Tensor] = lambda t: scale(scale(t, t), t)  # noqa: E731
            out = checkpoint(twice, leaf, use_reentrant=False) if recompute else twice(leaf)
            assert isinstance(out, Tensor)
            out.sum().backward()
            expected = leaf.grad if expected is None else expected
            assert torch.equal(leaf.grad, expected)
        assert kpt_core.explain(scale, leaf, leaf).kernel == "loopback:faulty"


def test_a_wrong_call_gets_the_reference_s_error_caused_by_the_kernel_s(warm: bool, x: Tensor) -> None:
    """The kernel raises, `second` raises and the reference raises: it is the call that is wrong."""
    wrong = torch.ones(3)
    Fault.error = OSError("invalid configuration argument")
    with pytest.raises(RuntimeError, match=r"size of tensor a .4. must match the size of tensor b .3.") as caught:
        scale(x, wrong)
    assert caught.value.__cause__ is Fault.error
    Fault.error = None
    with pytest.raises(RuntimeError, match="must match the size"):
        scale(x, wrong)
    assert Fault.calls == 2  # not quarantined even for such wrong calls
    assert hundreds(scale(x, x)) == 5


def test_a_failure_inside_a_block_is_the_same(warm: bool, x: Tensor) -> None:
    Fault.error = RuntimeError("no launch")
    with kpt_core.record() as log, pytest.warns(KernelFailedWarning):
        assert hundreds(scale(x, x)) == 2
    assert [selection.kernel for selection in log] == ["loopback:second"]


RESULTS: list[tuple[str, Callable[[kpt_core.Call], Any], str]] = [
    (
        "toy.layer",
        lambda call: call.x @ call.weight,
        r"expected \(results, saved\), since toy.layer says what is saved",
    ),
    ("toy.layer", lambda call: (call.x @ call.weight, (call.x,)), "it saved 1 tensors; toy.layer says 2"),
    ("toy.layer", lambda call: ((call.x @ call.weight).double(), (call.x,) * 2), "the contract of toy.layer says"),
    (
        "toy.layer",
        lambda call: (call.x, (call.x,) * 2),
        r"result 0 is torch.float32 \[3, 5\]; the contract of toy.layer",
    ),
    ("toy.best", lambda call: call.x, "toy.best gives 2 results"),
    ("toy.best", lambda call: (call.x, None), "result 1 is None; expected a tensor"),
]


@pytest.mark.parametrize(("name", "function", "said"), RESULTS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_results_that_are_not_what_the_contract_says_are_contained(
    add: Add, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None, name: str, function: Any, said: str, how: str
) -> None:
    op, row = kpt_core.get_op(name), next(each for each in toy_ops.KERNELS if each.op == name)
    attribute = row.forward.partition(":")[2]
    monkeypatch.setattr(toy_ops, attribute, function)
    add(Loopback(row, name="toys"))
    arguments = TABLES[name].arguments(TABLES[name].cases[0], dtype=torch.float32)
    arguments["x"].requires_grad_()
    run: Any = op if how == "eager" else torch.compile(lambda given: op(**given), backend="aot_eager")
    with pytest.warns(KernelFailedWarning, match=said):
        found = run(**arguments) if how == "eager" else run(arguments)
    torch.testing.assert_close(found, op.reference(**arguments))
