"""Calls that look alike are served by what a kernel prepared, until something ends that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, InputError, Kernel, RegistrationError, op
from kpt_core.dispatch import opaque
from loopback import Loopback

Add = Callable[[Backend], Backend]
#: "prepare" and "check" and "unsupported" as they are called; "served" by what was prepared.
SEEN: list[str] = []
#: What the prepared function raises.
ERROR: list[Exception] = []


def _check(call: Call) -> None:
    SEEN.append("check")
    if type(call.factor) is bool:
        raise InputError("factor must be a number; got a bool")


def _fake(call: Call) -> Tensor:
    return call.x.new_empty(call.x.shape)  # type: ignore[no-any-return]


@op("sample.prepared", check=_check, fake=_fake)
def prepared(x: Tensor, weight: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
    """Multiply."""
    return x * factor if weight is None else x * weight * factor


def unsupported(call: Call) -> str | None:
    SEEN.append("unsupported")
    return "no columns" if call.x.dim() == 1 else None


def forward(call: Call) -> Tensor:
    SEEN.append("forward")
    return prepared.run_reference(call) + 100  # type: ignore[no-any-return]


def prepare(call: Call) -> Callable[..., Tensor] | None:
    SEEN.append("prepare")
    if call.factor == 3:
        return None
    factor, rows = call.factor, call.x.shape[0]

    def serve(x: Tensor, weight: Tensor | None, _: float) -> Tensor:
        assert x.shape[0] == rows
        SEEN.append("served")
        if ERROR:
            raise ERROR[0]
        return (x * factor if weight is None else x * weight * factor) + 100  # type: ignore[no-any-return]

    return serve


def a_kernel(prepare: str = f"{__name__}:prepare") -> Kernel:
    refuses = f"{__name__}:unsupported"
    return Kernel("sample.prepared", forward=f"{__name__}:forward", unsupported=refuses, prepare=prepare)


@pytest.fixture(autouse=True)
def _inference() -> object:
    ERROR.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def table(add: Add) -> Tensor:
    """Two rows, which calls with a kernel ready have been made of."""
    add(Loopback(a_kernel()))
    x = torch.ones(2, 3)
    for _ in range(2):
        assert prepared(x).tolist() == (x + 100).tolist()
    SEEN.clear()
    return x


def test_calls_that_look_alike_are_asked_nothing(table: Tensor) -> None:
    count = next(each for each in kpt_core.counts() if each.op == "sample.prepared" and each.calls).calls
    assert prepared(2 * table).tolist() == (2 * table + 100).tolist()
    assert SEEN == ["served"]
    assert next(each for each in kpt_core.counts() if each.op == "sample.prepared" and each.calls).calls == count + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: prepared(x[:1]),
        lambda x: prepared(x.t().contiguous().t()),
        lambda x: prepared(x, x),
        lambda x: prepared(x, factor=2.0),
        lambda x: prepared(x, factor=1),
    ],
    ids=["shape", "strides", "a tensor for None", "another number", "another type of number"],
)
def test_what_looks_different_is_asked_anew(table: Tensor, call: Callable[[Tensor], Tensor]) -> None:
    for expected in (["check", "unsupported", "prepare", "served"], ["served"]):
        SEEN.clear()
        assert (call(table) >= 101).all()
        assert expected == SEEN


def test_another_dtype_is_asked_anew(table: Tensor) -> None:
    assert prepared(table.double()).dtype is torch.float64
    assert "check" in SEEN


def test_what_equals_a_good_argument_is_checked(table: Tensor) -> None:
    with pytest.raises(InputError, match="got a bool"):
        prepared(table, factor=True)


def test_where_nothing_is_prepared_the_kernel_is_asked_but_once(table: Tensor) -> None:
    for expected in (["check", "unsupported", "prepare", "forward"], ["check", "unsupported", "forward"]):
        SEEN.clear()
        prepared(table, factor=3)
        assert expected == SEEN


def test_a_refused_call_prepares_nothing(table: Tensor) -> None:
    for _ in range(2):
        assert prepared(table[0]).tolist() == [1, 1, 1], "the reference"
    assert "prepare" not in SEEN


def test_where_gradients_are_recorded_the_check_is_asked(table: Tensor) -> None:
    with torch.enable_grad():
        prepared(table)
        assert SEEN == ["check", "unsupported", "forward"]
        leaf = table.clone().requires_grad_()
        assert prepared(leaf).tolist() == table.tolist(), "the kernel has no backward"


def test_settings_are_seen(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with kpt_core.use("reference"):
        assert prepared(table).tolist() == table.tolist()
    seen: list[str] = []
    with kpt_core.observe(lambda selection: seen.append(selection.op)):
        prepared(table)
        prepared(table)
    assert seen == ["sample.prepared"] * 2
    monkeypatch.setenv("KPT_DISABLE", "loop")
    kpt_core.refresh()
    assert prepared(table).tolist() == table.tolist()


def test_a_better_kernel_is_seen(table: Tensor, add: Add) -> None:
    better = Kernel("sample.prepared", forward=f"{__name__}:better", priority=9)
    add(Loopback(better, name="other"))
    for _ in range(2):
        assert prepared(table).tolist() == (table + 900).tolist()


def better(call: Call) -> Tensor:
    return call.x + 900  # type: ignore[no-any-return]


def test_what_raises_is_contained_and_not_used_again(table: Tensor) -> None:
    ERROR.append(ValueError("broken"))
    with pytest.warns(kpt_core.KernelFailedWarning, match="raised ValueError: broken"):
        assert prepared(table).tolist() == table.tolist()
    SEEN.clear()
    assert prepared(table).tolist() == (table + 100).tolist()
    assert SEEN == ["check", "unsupported", "forward"]


def test_results_that_break_the_contract_are_contained(add: Add) -> None:
    add(Loopback(a_kernel(prepare=f"{__name__}:two"), name="two"))
    x = torch.ones(2, 3)
    prepared(x)
    with pytest.warns(kpt_core.KernelFailedWarning, match="gives 1 results"):
        assert prepared(x).tolist() == x.tolist()


def two(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda x, *_: (x, x)


def test_it_is_named_as_a_function() -> None:
    with pytest.raises(RegistrationError, match="'prepare' is not of the form"):
        a_kernel(prepare="prepare")


def test_a_graph_takes_the_short_way_too(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.kpt.sample_prepared.default
    for _ in range(2):
        assert operator(table, None, 1.0, "").tolist() == (table + 100).tolist()
        monkeypatch.setattr(prepared, "fake", None)  # the contract is asked once
        monkeypatch.setattr(opaque, "_run", None)
    assert SEEN == ["served", "served"]


SHAPES: list[tuple[int, ...]] = []


def shaped(call: Call) -> Tensor:
    return torch.zeros(SHAPES[0])


def test_in_a_graph_each_result_is_held_to_the_contract(add: Add) -> None:
    add(Loopback(Kernel("sample.prepared", forward=f"{__name__}:shaped")))
    operator, x = torch.ops.kpt.sample_prepared.default, torch.ones(2, 3)
    SHAPES[:] = [(2, 3)]
    for _ in range(2):
        assert operator(x, None, 1.0, "").tolist() == torch.zeros(2, 3).tolist()
    SHAPES[:] = [(3, 2)]  # which a graph would read as another
    with pytest.warns(kpt_core.KernelFailedWarning, match=r"the contract of sample.prepared says"):
        assert operator(x, None, 1.0, "").tolist() == x.tolist()


def itself(call: Call) -> Callable[..., Tensor]:
    return lambda x, *_: x


def turned(call: Call) -> Callable[..., Tensor]:
    return lambda x, *_: (x.t() + 100).t()


@pytest.mark.parametrize("prepare", ["itself", "turned"])
def test_what_a_graph_gets_is_its_own_and_contiguous_whatever_was_prepared(add: Add, prepare: str) -> None:
    add(Loopback(a_kernel(prepare=f"{__name__}:{prepare}")))
    operator, x = torch.ops.kpt.sample_prepared.default, torch.ones(2, 3)
    for _ in range(4):
        found = operator(x, None, 1.0, "")
        assert found.is_contiguous()
        assert found.data_ptr() != x.data_ptr()


def test_in_a_graph_what_raises_is_contained_too(table: Tensor) -> None:
    operator = torch.ops.kpt.sample_prepared.default
    operator(table, None, 1.0, "")
    ERROR.append(ValueError("broken"))
    with pytest.warns(kpt_core.KernelFailedWarning, match="raised ValueError: broken"):
        assert operator(table, None, 1.0, "").tolist() == table.tolist()
    with torch.enable_grad():
        assert operator(table.clone().requires_grad_(), None, 1.0, "x").requires_grad
