"""Ops inside torch.compile and torch.export: no graph break, nothing of dispatch in the graph, no stale choice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx import GraphModule

import kpt_core
from kpt_core import Backend, NoKernelError
from loopback import Fault, Loopback, hundreds, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]
both = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def functions(graph: torch.fx.Graph) -> list[str]:
    """Names of what a graph calls."""
    assert {node.op for node in graph.nodes} <= {"placeholder", "output", "call_function"}
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return [str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__ for target in targets]


def traced(function: Callable[..., Tensor], *args: Tensor) -> list[str]:
    """What the one graph of a compiled function calls."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return module.forward

    torch.compile(function, fullgraph=True, backend=keep)(*args)
    (graph,) = graphs
    return functions(graph)


def composed(x: Tensor) -> Tensor:
    return shifted(x) * scale(x, x, factor=3.0)


@both
@pytest.mark.parametrize("served", [None, "first", "opaque"])
def test_compiled_and_eager_agree_forward_and_backward(add: Add, compiler: str, served: str | None) -> None:
    if served:
        add(Loopback(kernel(served)))
    results = []
    for function in (composed, torch.compile(composed, fullgraph=True, backend=compiler)):
        x = torch.arange(4.0, requires_grad=True)
        out = function(x)
        out.sum().backward()
        results.append((out, x.grad))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


def test_the_graph_holds_the_reference_s_operations_alone(x: Tensor) -> None:
    assert traced(lambda x: scale(x, x), x) == ["mul", "mul"]
    assert traced(shifted, x) == ["mul", "mul", "add"]


def test_the_graph_holds_the_kernel_alone(add: Add, x: Tensor) -> None:
    add(
        Loopback(kernel("opaque", unsupported="at_most_four_rows", forward_only=True, requires={"c"}), capabilities="c")
    )
    assert traced(lambda x: scale(x, x), x) == ["loopback.opaque.default"]
    assert traced(shifted, x) == ["loopback.opaque.default", "add"]


def test_there_is_no_graph_break(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("opaque", unsupported="at_most_four_rows", priority=1), kernel("first")))
    found = torch._dynamo.explain(composed)(x)
    assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_every_form_of_call(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    compiled = torch.compile(
        lambda x: scale(weight=x, x=x, factor=2.0) + scale(x, weight=x), fullgraph=True, backend="eager"
    )
    assert compiled(x)[0] == 203


def test_backends_that_come_and_go_take_effect_at_the_next_call(add: Add, x: Tensor) -> None:
    count = CompileCounter()
    compiled = torch.compile(shifted, fullgraph=True, backend=count)
    assert compiled(x)[0] == 3
    add(Loopback(kernel("first")))
    assert compiled(x)[0] == 103
    add(Loopback(kernel("opaque", priority=1), name="other"))
    assert compiled(x)[0] == 603
    kpt_core.remove_backend("other")
    assert compiled(x)[0] == 103
    kpt_core.remove_backend("loop")
    assert compiled(x)[0] == 3
    assert count.frame_count == 5


@pytest.mark.parametrize("used_before", [False, True])
def test_use_around_the_call_takes_effect_and_each_choice_is_compiled_once(
    add: Add, x: Tensor, used_before: bool
) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count)

    def work() -> list[int]:
        seen = []
        if used_before:
            with kpt_core.use("reference"):
                scale(x, x)
        for _ in range(2):
            seen.append(hundreds(compiled(x)))
            with kpt_core.use("loopback:second"):
                seen.append(hundreds(compiled(x)))
                with kpt_core.use("reference"):
                    seen.append(hundreds(compiled(x)))
        return seen

    with ThreadPoolExecutor(1) as fresh_thread:  # other tests opened blocks in this one
        assert fresh_thread.submit(work).result() == [1, 2, 0] * 2
    assert count.frame_count == 3


def test_use_in_a_thread_that_never_compiled(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    assert hundreds(compiled(x)) == 1

    def work() -> list[int]:
        plain = hundreds(compiled(x))
        with kpt_core.use("reference"):
            return [plain, hundreds(compiled(x))]

    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(work).result() == [1, 0]
    assert hundreds(compiled(x)) == 1


def test_eager_calls_in_between_compile_nothing_anew(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second")))
    count = CompileCounter()
    compiled = torch.compile(composed, fullgraph=True, backend=count)
    for argument in (x, x.double(), torch.ones(5)):
        compiled(x)
        composed(argument)
    compiled(x)
    assert count.frame_count == 1


def test_conditional_kernels_are_chosen_for_each_shape(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("opaque", unsupported="at_most_four_rows", priority=1), kernel("first")))
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager", dynamic=dynamic)
        assert [hundreds(compiled(torch.ones(rows))) for rows in (3, 5, 4, 6, 2)] == [6, 1, 6, 1, 6]


def test_dtypes_and_gradients_are_looked_at(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", dtypes={"float32"}, forward_only=True)))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    assert [hundreds(compiled(t)) for t in (x, x.double(), x.clone().requires_grad_(), x)] == [1, 0, 0, 1]


def test_autocast(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.mixed", dtypes={"bfloat16"})))
    compiled = torch.compile(lambda x: mixed(x, x, x.to(torch.int32)), fullgraph=True, backend="eager")
    assert hundreds(compiled(x)) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert hundreds(compiled(x)) == 1


def test_has_kernel(add: Add, x: Tensor) -> None:
    compiled = torch.compile(lambda x: x + scale.has_kernel(x), fullgraph=True, backend="eager")
    assert compiled(x)[0] == 1
    add(Loopback(kernel("first")))
    assert compiled(x)[0] == 2


def test_a_quarantined_kernel_stays_out_of_compiled_code(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", priority=1), kernel("second")))
    for dynamic in (False, True):
        compiled = torch.compile(lambda x: scale(x, x, factor=1.0), fullgraph=True, backend="eager", dynamic=dynamic)
        assert hundreds(compiled(x)) == 5
        Fault.error = RuntimeError("no launch")
        with pytest.warns(kpt_core.KernelFailedWarning):
            scale(x, x)
        Fault.error = None
        assert [hundreds(compiled(torch.ones(rows))) for rows in (4, 5, 6)] == [2, 2, 2]
        kpt_core.refresh()
        assert hundreds(compiled(x)) == 5


def test_explicit_choices_that_cannot_be_kept_raise(add: Add) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    large = torch.ones(5)
    whole = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    with kpt_core.use("loop"):
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"NoKernelError.*no kernel for sample.scale on cpu: loop was"
        ):
            whole(large)
        with pytest.raises(NoKernelError, match="5 rows; takes at most 4"):
            torch.compile(lambda x: scale(x, x), backend="eager")(large)
        assert hundreds(whole(torch.ones(4))) == 1


@pytest.mark.parametrize(("block", "name"), [(lambda: kpt_core.use("reference"), "use"), (kpt_core.record, "record")])
def test_blocks_are_opened_around_compiled_code(
    x: Tensor, block: Callable[[], AbstractContextManager[object]], name: str
) -> None:
    def inside(x: Tensor) -> Tensor:
        with block():
            return scale(x, x)

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=rf"InputError.*{name}\(\) can't be opened inside a compiled"
    ):
        torch.compile(inside, fullgraph=True, backend="eager")(x)


def test_record_hears_nothing_of_compiled_code(x: Tensor) -> None:
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    with kpt_core.record() as log:
        compiled(x)
        compiled(x)
    assert log == []


class Model(torch.nn.Module):
    """A composite op in a model."""

    def forward(self, x: Tensor) -> Tensor:
        return shifted(x)


@pytest.mark.parametrize("strict", [False, True])
def test_export(add: Add, x: Tensor, strict: bool) -> None:
    plain = torch.export.export(Model(), (x,), strict=strict)
    assert functions(plain.graph) == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]
    add(Loopback(kernel("opaque")))
    program = torch.export.export(Model(), (x,), strict=strict)
    assert functions(program.graph) == ["loopback.opaque.default", "aten.add.Tensor"]
    kpt_core.remove_backend("loop")
    assert program.module()(x)[0] == 603
