"""Ops of the kinds that are coming, by reference and by kernel, through eager calls, torch.compile and torch.export."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map_only

import kpt_core
import toy_ops
from kpt_core import Backend, InputError, KernelFailedWarning
from loopback import Loopback
from toy_cases import TABLES, Arguments, Case
from toy_ops import KERNELS, RAN, append, clear

Add = Callable[[Backend], Backend]
ROWS = [(table.op, case) for table in TABLES.values() for case in table.cases]
#: For compilers, which take their time: a call of each op, and one with other arguments.
FEW = [(table.op, case) for table in TABLES.values() for case in (table.cases[0], table.cases[-1])]


def rows(pairs: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "case"), pairs, ids=[f"{op}: {case.name}" for op, case in pairs])


served = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])


@pytest.fixture(autouse=True)
def clean(fresh_compiler: None) -> None:
    RAN.clear()


class Layer(torch.nn.Module):
    """An op as a module, for torch.export."""

    def __init__(self, op: kpt_core.Op[..., Any]) -> None:
        super().__init__()
        self.op = op

    def forward(self, arguments: Arguments) -> Any:
        return self.op(**arguments)


def outcome(name: str, run: Callable[[Arguments], Any], case: Case, gradients: bool) -> list[Tensor]:
    """Results, what the arguments are afterwards, and the gradients of a loss that weighs every element differently."""
    table = TABLES[name]
    arguments = table.arguments(case, dtype=torch.float64)
    wanting = [each for each in tree_leaves([arguments[n] for n in table.gradients]) if each is not None] * gradients
    for tensor in wanting:
        tensor.requires_grad_()
    results = tree_leaves(run(arguments))
    found = [*results, *tree_leaves(arguments)]
    if wanting:
        out = results[0]
        slopes = torch.arange(out.numel()).view(out.shape).cos().to(out.dtype)
        found += torch.autograd.grad(out, wanting, slopes)
    return [each for each in found if isinstance(each, Tensor)]


WAYS: dict[str, Callable[..., Callable[[Arguments], Any]]] = {
    "eager": lambda run: run,
    "compiled": partial(torch.compile, fullgraph=True, backend="aot_eager"),
    "dynamic": partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=True),
}


def ran(name: str) -> set[str]:
    """What of an op's kernels ran."""
    return {attribute for attribute in RAN if attribute.startswith(name.partition(".")[2])}


@served
@pytest.mark.parametrize(
    ("name", "case", "how"),
    [(*row, how) for how in ("eager", "compiled", "dynamic") for row in (ROWS if how == "eager" else FEW)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_way_gives_what_the_reference_gives(add: Add, name: str, case: Case, how: str, kernels: bool) -> None:
    op, table = kpt_core.get_op(name), TABLES[name]
    if kernels:
        add(Loopback(*KERNELS))
    for gradients in {False, bool(table.gradients)}:
        expected = outcome(name, lambda arguments: op.reference(**arguments), case, gradients)
        run = WAYS[how](lambda arguments: op(**arguments))
        RAN.clear()
        torch.testing.assert_close(outcome(name, run, case, gradients), expected)
        assert bool(ran(name)) == kernels
        assert not kernels or gradients == any("backward" in attribute for attribute in ran(name))


@served
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@rows(FEW)
def test_exported_programs_choose_where_they_run(add: Add, name: str, case: Case, strict: bool, kernels: bool) -> None:
    op = kpt_core.get_op(name)
    arguments = TABLES[name].arguments(case)
    program = torch.export.export(Layer(op), (copy.deepcopy(arguments),), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    if kernels:  # which were not there when it was exported
        add(Loopback(*KERNELS))
    loaded, again = torch.export.load(file).module(), copy.deepcopy(arguments)
    RAN.clear()
    results = tree_leaves(loaded(again))
    expected = tree_leaves(op.reference(**arguments))
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(tree_leaves(again), tree_leaves(arguments))  # caches are changed
    assert bool(ran(name)) == kernels


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cache_is_not_written_twice(add: Add, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Whatever a kernel that raised has written, nobody runs after it."""

    def fail() -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(toy_ops, "append_kernel", lambda call: (call.keys.add_(1), fail()))
    add(Loopback(*KERNELS))
    run: Any = torch.compile(lambda *args: append(*args), backend="aot_eager") if compiled else append
    keys, values, new = torch.zeros(4, 5), torch.zeros(4, 5), torch.ones(1, 5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no launch") as caught:
            run(keys, values, new, 0)
    assert "raised by kernel loop/toy.append/toy_ops:append_kernel" in str(getattr(caught.value, "__notes__", ""))
    assert values.sum() == 0
    assert keys.max() <= 3
    assert kpt_core.explain(append, keys, values, new, 0).kernel == "reference", "it is off"


def test_no_gradient_flows_through_what_is_changed() -> None:
    keys, values, new = torch.zeros(4, 5, requires_grad=True), torch.zeros(4, 5), torch.ones(1, 5)
    message = r"toy.append changes keys, which requires a gradient, and none flows .*: give keys.detach\(\)"
    for run in (append, torch.compile(lambda *args: append(*args), backend="eager")):
        with pytest.raises(InputError, match=message):
            run(keys, values, new, 0)
        with torch.no_grad():
            assert run(keys, values, new, 0).sum() == 15
    assert kpt_core.explain(clear, keys.detach()).kernel == "reference"


def attention(cache: Tensor | None, k: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return toy_ops.attend(torch.ones(2, 5, dtype=k.dtype), k, cache, 3, 1, 0, lse=True, **options)


@served
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("how", ["eager", "profiled", "compiled", "exported", "counted"])
def test_attention_with_a_cache_in_every_way(add: Add, kernels: bool, cached: bool, gradients: bool, how: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    if kernels:
        add(Loopback(*KERNELS))
    cache = torch.randn(6, 5, dtype=torch.float64) if cached else None
    k = torch.randn(2, 5, dtype=torch.float64, requires_grad=gradients)
    want_cache, want_k = copy.deepcopy(cache), k.detach().clone().requires_grad_(gradients)
    want = toy_ops.attend.reference(torch.ones(2, 5, dtype=k.dtype), want_k, want_cache, 3, 1, 0, lse=True)
    w = torch.ones(6, 5, dtype=torch.float64, requires_grad=True)
    stale = (w * cache).sum() if cache is not None else None  # saves the cache as it is before
    if how == "compiled":
        got = torch.compile(attention, backend="aot_eager", fullgraph=True)(cache, k)
    elif how == "exported":
        program = torch.export.export(Attention(), (copy.deepcopy(cache), k.detach())).module()
        got = program(cache, k.detach())
    else:
        watched = {"profiled": torch.profiler.profile, "counted": lambda: FlopCounterMode(display=False)}
        with watched.get(how, torch.enable_grad)(), torch.set_grad_enabled(gradients):
            got = attention(cache, k)
    torch.testing.assert_close([each.detach() for each in got], [each.detach() for each in want])
    if cache is not None:
        torch.testing.assert_close(cache, want_cache.detach())
        assert not cache.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
    if gradients and how != "exported":
        for result in range(2):
            slopes = [
                torch.autograd.grad(each[result].cos().sum(), x, retain_graph=True)
                for each, x in ((got, k), (want, want_k))
            ]
            torch.testing.assert_close(*slopes)
    assert bool(RAN["attend_kernel"]) == kernels


class Attention(torch.nn.Module):
    def forward(self, cache: Tensor | None, k: Tensor) -> Any:
        return attention(cache, k)


@served
def test_a_second_derivative_beside_a_cache(add: Add, kernels: bool) -> None:
    if kernels:
        add(Loopback(*KERNELS))
    cache = torch.randn(6, 5, dtype=torch.float64)

    def of(k: Tensor) -> Tensor:
        return attention(cache.clone(), k)[0]

    assert torch.autograd.gradgradcheck(of, torch.randn(2, 5, dtype=torch.float64, requires_grad=True))


def test_a_broken_kernel_that_writes_is_quarantined(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_ops, "attend_kernel", lambda call: 1 / 0)
    add(Loopback(*KERNELS))
    for rows in range(1, 4):
        cache = torch.zeros(9, 5)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            toy_ops.attend(torch.ones(rows, 5), torch.ones(rows, 5), cache, 0, 1, 0)
    with torch.no_grad():
        toy_ops.attend(torch.ones(4, 5), torch.ones(4, 5), torch.zeros(9, 5), 0, 1, 0)
    told = kpt_core.explain(toy_ops.attend, torch.ones(5, 5), torch.ones(5, 5), torch.zeros(9, 5), 0, 1, 0)
    assert "quarantined: it raised 3 times" in str(told.refusals[0])


@served
def test_a_cache_grows_through_compiled_code(add: Add, kernels: bool) -> None:
    """Writes come one after the other, as in eager mode, and make one graph for all positions."""
    if kernels:
        add(Loopback(*KERNELS))

    def step(keys: Tensor, values: Tensor, new: Tensor, position: int) -> Tensor:
        first = append(keys, values, new, position)
        clear(keys, torch.arange(8) < 6)
        return first + append(keys, values, new + 1, position + 1)

    count = CompileCounterWithBackend("aot_eager")
    states = []
    for run in (step, torch.compile(step, backend=count, fullgraph=True)):
        keys, values = torch.zeros(8, 5), torch.zeros(8, 5)
        outs = [run(keys, values, torch.full((1, 5), float(position)), position) for position in (0, 2, 4, 6)]
        states.append([keys, values, *outs])
    torch.testing.assert_close(*states)
    assert count.frame_count <= 2
    assert RAN["append_kernel"] == 16 * kernels


def test_randomness_comes_from_seed_and_offset_alone(add: Add) -> None:
    x = torch.ones(64, 8)
    before = torch.get_rng_state()
    compiled = torch.compile(lambda x, seed, offset: toy_ops.dropout(x, seed, offset), backend="aot_eager")
    for kernels in (False, True):
        if kernels:
            add(Loopback(*KERNELS))
        one, again, other, later = (
            run(x, seed, offset)
            for run, seed, offset in (
                (toy_ops.dropout, 1, 0),
                (compiled, 1, 0),
                (toy_ops.dropout, 2, 0),
                (compiled, 1, 9),
            )
        )
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert not torch.equal(one, later)
        assert 0.4 < (one == 0).double().mean() < 0.6
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_of_a_random_op_are_quarantined_like_others(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_ops, "dropout_kernel", lambda call: 1 / 0)
    add(Loopback(*KERNELS))
    x = torch.ones(4)
    with pytest.warns(KernelFailedWarning):
        assert torch.equal(toy_ops.dropout(x, 1, 0), toy_ops.dropout.reference(x, 1, 0))


def test_a_backend_for_a_type_of_two_names_serves_both(add: Add) -> None:
    """No such device is needed to see which kernels may serve it."""
    add(Loopback(*KERNELS, device_types=("xla", "tpu"), capabilities={"bf16"}, slow=True))

    class Device:
        """Stands for torch's, which knows one of the names only once its plug-in is there."""

        def __init__(self, kind: str) -> None:
            self.type = kind

    for kind, count in (("xla", 2), ("tpu", 2), ("cpu", 0)):
        device: Any = Device(kind)
        assert len(toy_ops.layer.candidates(device, torch.float32).accepted) == count
        assert kpt_core.registry.serves(kind) == (count > 0)
        assert kpt_core.registry.reference_is_slow(device) == (count > 0)
    assert torch.device("xla", 0).type == "xla"


def test_arguments_are_left_as_they_were_given(add: Add) -> None:
    add(Loopback(*KERNELS))
    for name, case in ROWS:
        arguments = TABLES[name].arguments(case)
        before = tree_map_only(Tensor, torch.clone, arguments)
        op = kpt_core.get_op(name)
        op(**arguments)
        for argument in set(arguments) - op.mutates:
            torch.testing.assert_close(arguments[argument], before[argument])
