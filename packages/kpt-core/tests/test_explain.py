"""`explain` tells what a call would run, computes nothing, and is right for any set of kernels."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, Kernel, Refusal, UnknownNameError, registry
from loopback import Fault, Loopback, checked, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]
ListTorch = Callable[..., None]
PARTS = kernel("parts", "sample.shifted", composed_of=("sample.scale",))


def test_takes_the_op_or_its_name_and_every_form_of_call(x: Tensor) -> None:
    by_op = kpt_core.explain(scale, x, x, factor=2.0)
    assert kpt_core.explain("sample.scale", x=x, weight=x) == by_op == scale.explain(x, weight=x)
    assert by_op.op == "sample.scale"


def test_an_unknown_op_offers_the_nearest(x: Tensor) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown op 'sample.shift': did you mean 'sample.shifted'"):
        kpt_core.explain("sample.shift", x)


def test_neither_kernel_nor_reference_is_called(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    add(Loopback(kernel("faulty")))
    assert kpt_core.explain(scale, x, x).kernel == "loopback:faulty"
    assert Fault.calls == 0

    def fail(*_: object) -> Tensor:
        raise AssertionError("computed")

    monkeypatch.setattr(checked, "fake", lambda call: torch.empty_like(call.x))
    monkeypatch.setattr(checked, "run_reference", fail)
    assert kpt_core.explain(checked, torch.ones(2)).kernel == "reference"


def test_the_kernels_inside_a_composite_are_not_called_either(add: Add, list_torch: ListTorch, x: Tensor) -> None:
    """They might refuse fake tensors, and be quarantined for it."""
    list_torch(PARTS)
    add(Loopback(kernel("faulty")))
    Fault.error = RuntimeError("needs real memory")
    (child,) = kpt_core.explain(shifted, x).children
    assert child.kernel == "loopback:faulty"
    assert Fault.calls == 0
    Fault.error = None
    assert shifted(x)[0] == 503


def test_a_composite_that_reads_values_is_explained_without_its_parts(
    list_torch: ListTorch, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopback.parts", lambda call: call.x * 2 if call.x.tolist()[0] else scale(call.x, call.x))
    list_torch(PARTS)
    explained = kpt_core.explain(shifted, x)
    assert (explained.kernel, explained.children) == ("loopback:parts", ())
    assert shifted(x)[0] == 2


def test_inputs_and_random_state_are_left_as_they_are(x: Tensor) -> None:
    before, state = x.clone(), torch.get_rng_state()
    x.requires_grad_()
    kpt_core.explain(shifted, x)
    assert torch.equal(x, before)
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("differentiable", [False, True])
def test_children_are_those_of_the_call(add: Add, list_torch: ListTorch, x: Tensor, differentiable: bool) -> None:
    """Shapes reach them, and gradients where autograd looks into the kernel."""
    list_torch(kernel("parts", "sample.shifted", composed_of=("sample.scale",), differentiable=differentiable))
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second", dtypes={"bfloat16"})))
    large = torch.ones(5)
    for argument, served in (
        (x, ["loopback:first"]),
        (large, ["reference"]),
        (x.clone().requires_grad_(), ["reference"] if differentiable else []),
        (large.bfloat16(), ["loopback:second"]),
    ):
        explained = kpt_core.explain(shifted, argument)
        with kpt_core.record() as log:
            shifted(argument)
        assert log == [explained]
        assert [child.kernel for child in explained.children] == served


def test_a_composite_served_as_a_whole_has_no_children(add: Add, list_torch: ListTorch, x: Tensor) -> None:
    list_torch(PARTS)
    add(Loopback(kernel("whole", "sample.shifted"), kernel("first")))
    explained = kpt_core.explain(shifted, x)
    with kpt_core.record() as log:
        shifted(x)
    assert log == [explained]
    assert explained.children == ()


def test_a_tree_of_three_levels(add: Add, list_torch: ListTorch, x: Tensor) -> None:
    composed_of = ("sample.shifted", "sample.scale")
    list_torch(Kernel("sample.outer", f"{__name__}:outer_parts", composed_of=composed_of), PARTS)
    add(Loopback(kernel("first")))
    explained = kpt_core.explain(outer, x)
    with kpt_core.record() as log:
        outer(x)
    assert log == [explained]
    assert [child.op for child in explained.children] == ["sample.shifted", "sample.scale"]
    assert [child.op for child in explained.children[0].children] == ["sample.scale"]


@kpt_core.op("sample.outer")
def outer(x: Tensor) -> Tensor:
    """Composite of a composite."""
    return x * x * 3.0 + 1.0


def outer_parts(call: Call) -> Tensor:
    return shifted(call.x) + scale(call.x, call.x)


CAPABILITIES = ("c0", "c1", "c2")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
#: The kernels of the property: `k0` to `k5`, and refusals above 1, 2 and 3 rows.
MODULE = types.ModuleType("explained")


def _make_kernel(index: int) -> Callable[[Call], Tensor]:
    return lambda call: call.x * call.weight * call.factor + 100 * (index + 1)


def _make_refusal(limit: int) -> Callable[[Call], Refusal | None]:
    return lambda call: Refusal("takes at most {limit}", limit=limit) if call.x.shape[0] > limit else None


for _index in range(6):
    setattr(MODULE, f"k{_index}", _make_kernel(_index))
for _limit in (1, 2, 3):
    setattr(MODULE, f"at_most_{_limit}", _make_refusal(_limit))


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "explained", MODULE)


@st.composite
def backends(draw: st.DrawFn) -> list[Loopback]:
    kernels = [
        Kernel(
            "sample.scale",
            f"explained:k{index}",
            requires=draw(st.frozensets(st.sampled_from(CAPABILITIES), max_size=2)),
            priority=draw(st.integers(-1, 1)),
            dtypes=draw(st.none() | st.frozensets(st.sampled_from([str(d) for d in DTYPES]), max_size=2)),
            unsupported=draw(st.none() | st.sampled_from([f"explained:at_most_{limit}" for limit in (1, 2, 3)])),
            backward=draw(st.sampled_from([None, "loopback:backward"])),
        )
        for index in range(draw(st.integers(0, 6)))
    ]
    found = []
    for name in ("a", "b", "c"):
        count = draw(st.integers(0, len(kernels)))
        mine, kernels = kernels[:count], kernels[count:]
        found.append(
            Loopback(
                *mine,
                name=name,
                device_types=draw(st.sampled_from([("cpu",), ("cuda", "cpu"), ("cuda",)])),
                capabilities=draw(st.frozensets(st.sampled_from(CAPABILITIES))),
                unavailable=draw(st.none() | st.just("no driver")),
            )
        )
    return found


@contextmanager
def added(backends: list[Loopback]) -> Iterator[None]:
    for backend in backends:
        registry.add_backend(backend)
    try:
        yield
    finally:
        for backend in backends:
            registry.remove_backend(backend.name)


def accepts(backend: Loopback, kernel: Kernel, x: Tensor) -> bool:
    """The rules, written down a second time."""
    limit = int(kernel.unsupported.rpartition("_")[2]) if kernel.unsupported else 99
    return (
        "cpu" in backend.device_types
        and backend.sentence is None
        and kernel.requires <= backend.able
        and (kernel.dtypes is None or str(x.dtype).removeprefix("torch.") in kernel.dtypes)
        and x.shape[0] <= limit
        and not (kernel.backward is None and x.requires_grad)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    backends(), st.lists(st.tuples(st.integers(1, 4), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=4)
)
def test_for_any_kernels_explain_is_what_runs_and_what_runs_is_allowed(
    backends: list[Loopback], calls: list[tuple[int, torch.dtype, bool]]
) -> None:
    with added(backends):
        for rows, dtype, grad in calls:
            x = torch.ones(rows, dtype=dtype, requires_grad=grad)
            offers = [(backend, kernel) for backend in backends for kernel in backend.offered]
            allowed = [(b, k) for b, k in offers if accepts(b, k, x)]
            explained = kpt_core.explain(scale, x, x)
            with kpt_core.record() as log:
                recorded = scale(x, x)
            plain, again = scale(x, x), scale(x, x)
            assert log == [explained]
            assert torch.equal(plain, recorded)
            assert torch.equal(again, recorded)
            best = min(allowed, key=lambda offer: (-offer[1].priority, offer[0].name, offer[1].forward), default=None)
            assert explained.kernel == (best[1].forward if best else "reference")
            expected = 100 * (int(best[1].forward[-1]) + 1) if best else 0
            assert abs(recorded[0].item() - expected - 1) <= 2  # bfloat16 rounds 601 to 600
            named: list[Any] = [refusal.kernel for refusal in explained.refusals if refusal.kernel]
            assert len(named) == len(set(named))
            assert explained.kernel not in named
            if best is None:
                assert len(named) == len(offers)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(backends(), st.sampled_from(["a", "b", "c", "reference"]), st.integers(1, 4))
def test_for_any_kernels_a_choice_is_kept_or_raises(backends: list[Loopback], choice: str, rows: int) -> None:
    x = torch.ones(rows)
    with added(backends), kpt_core.use(choice):
        possible = choice == "reference" or any(
            accepts(b, k, x) for b in backends if b.name == choice for k in b.offered
        )
        if possible:
            assert kpt_core.explain(scale, x, x).backend == choice
            scale(x, x)
        else:
            for call in (scale, scale.explain):
                with pytest.raises(kpt_core.NoKernelError):
                    call(x, x)


def test_under_autocast(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.mixed", dtypes={"bfloat16"})))
    with torch.autocast("cpu", torch.bfloat16):
        explained = kpt_core.explain(mixed, x, x, x)
        with kpt_core.record() as log:
            mixed(x, x, x)
    assert log == [explained]
    assert explained.kernel == "loopback:mixed_first"
