"""Ops inside torch.compile: no graph break, few graphs, and the kernel is chosen when the code runs, by real sizes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.fx import GraphModule

import kpt_core
import toy_ops
from kpt_core import Backend, InputError, KernelFailedWarning, NoKernelError, registry
from loopback import Fault, Loopback, hundreds, kernel, mixed, scale, shifted
from toy_ops import KERNELS, RAN, layer

Add = Callable[[Backend], Backend]
#: On both sides of a gate, none of them another dimension's.
SIZES = (7, 40, 64, 65, 66, 200, 500, 1000)


@pytest.fixture(autouse=True)
def fresh(fresh_compiler: None) -> None:
    RAN.clear()


def traced(function: Callable[..., Any], *args: Tensor) -> list[str]:
    """What the one graph of a compiled function calls."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return module.forward

    torch.compile(function, fullgraph=True, backend=keep)(*args)
    (graph,) = graphs
    assert {node.op for node in graph.nodes} <= {"placeholder", "output", "call_function"}
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return [str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__ for target in targets]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_sizes_on_both_sides_of_a_gate_make_two_graphs(add: Add, training: bool, compiler: str) -> None:
    """One with fixed sizes and one for all; `record` sees which kernel ran."""
    add(Loopback(*KERNELS))
    count = CompileCounterWithBackend(compiler)
    compiled = torch.compile(lambda x, w, b: layer(x, w, b).tanh(), fullgraph=True, backend=count)
    weight, bias = torch.randn(5, 4, requires_grad=training), torch.randn(4, requires_grad=training)
    for rows in SIZES:
        x = torch.randn(rows, 5, requires_grad=training)
        with kpt_core.record() as log:
            out = compiled(x, weight, bias)
        expected = layer.reference(x, weight, bias).tanh()
        torch.testing.assert_close(out, expected)
        assert [each.kernel for each in log] == [f"toy_ops:layer_kernel{'' if rows <= 64 else '_for_many'}"]
        assert log[0].key == (("gradient",) if training else ())
        if training:
            wanting = (x, weight, bias)
            found, right = (torch.autograd.grad(each.sum(), wanting) for each in (out, expected))
            torch.testing.assert_close(found, right)
    assert count.frame_count <= 2
    assert {"layer_kernel": 3, "layer_kernel_for_many": 5, **({"layer_backward": 8} if training else {})} == RAN


def test_a_size_marked_as_dynamic_stays_so(add: Add) -> None:
    add(Loopback(*KERNELS))
    count = CompileCounter()
    compiled = torch.compile(lambda x, w: layer(x, w), fullgraph=True, backend=count)
    weight = torch.randn(5, 4)
    for rows in SIZES:
        x = torch.randn(rows, 5)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, weight)
    assert count.frame_count == 1
    assert RAN == {"layer_kernel": 3, "layer_kernel_for_many": 5}


def test_inductor_compiles_forward_and_backward(add: Add) -> None:
    add(Loopback(*KERNELS))
    x, weight = torch.randn(7, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    function = lambda x, w: layer(x.sin(), w).cos().sum()  # noqa: E731
    results = []
    for run in (function, torch.compile(function, fullgraph=True)):
        out = run(x, weight)
        results.append((out, *torch.autograd.grad(out, (x, weight))))
    # Inductor's sine and cosine are not PyTorch's to the last bit, and the product between them takes it further.
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert RAN == {"layer_kernel": 2, "layer_backward": 2}


def test_the_graph_holds_the_opaque_op_where_a_vendor_may_serve(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows", requires={"c"}), capabilities="c"))
    assert traced(lambda x: scale(x, x) + 1, x) == ["kpt.sample_scale.default", "add"]


def test_the_graph_holds_plain_pytorch_where_nothing_else_may_serve(list_torch: Callable[..., None], x: Tensor) -> None:
    """So that the compiler may fuse it: the reference, or the best kernel that it may look into."""
    assert traced(lambda x: scale(x, x), x) == ["mul", "mul"]
    for settings, inference, training in (
        ({"traceable": True}, ["mul", "mul", "add"], ["kpt.sample_scale.default"]),
        ({"traceable": True, "differentiable": True}, ["mul", "mul", "add"], ["mul", "mul", "add"]),
        ({}, ["kpt.sample_scale.default"], ["kpt.sample_scale.default"]),
        ({"traceable": True, "unsupported": "never_refuses"}, ["mul", "mul", "add"], ["kpt.sample_scale.default"]),
        ({"traceable": True, "unsupported": "refuses_all"}, *[["kpt.sample_scale.default"]] * 2),
    ):
        list_torch(kernel("first", **settings))
        for argument, expected in ((x, inference), (x.clone().requires_grad_(), training)):
            torch._dynamo.reset()
            assert traced(lambda x: scale(x, x), argument) == expected
    list_torch(kernel("parts", "sample.shifted", composed_of=("sample.scale",), traceable=True))
    torch._dynamo.reset()
    assert traced(shifted, x) == ["mul", "mul", "add"]


def test_every_form_of_call(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    compiled = torch.compile(
        lambda x: scale(weight=x, x=x, factor=2.0) + scale(x, weight=x), fullgraph=True, backend="eager"
    )
    assert compiled(x)[0] == 203


def test_backends_that_come_and_go_take_effect_at_the_next_call(add: Add, x: Tensor) -> None:
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count)
    assert hundreds(compiled(x)) == 0
    for name, served in (("first", 1), ("second", 2)):
        add(Loopback(kernel(name, priority=served), name=name))
        assert hundreds(compiled(x)) == served
    registry.remove_backend("second")
    assert hundreds(compiled(x)) == 1
    registry.remove_backend("first")
    assert hundreds(compiled(x)) == 0
    assert count.frame_count <= 2  # plain PyTorch, and the opaque op for all others


@pytest.mark.parametrize("traced_inside", [False, True])
def test_use_around_the_call_takes_effect_and_compiles_nothing_anew(add: Add, x: Tensor, traced_inside: bool) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count)

    def served() -> list[int]:
        seen = [hundreds(compiled(x))]
        with kpt_core.use("loopback:second"):
            seen.append(hundreds(compiled(x)))
            with kpt_core.use("reference"):
                seen.append(hundreds(compiled(x)))
        return seen

    if traced_inside:
        with kpt_core.use("reference"):
            assert hundreds(compiled(x)) == 0
    assert served() == [1, 2, 0]
    with ThreadPoolExecutor(1) as other_thread, kpt_core.use("reference"):
        assert other_thread.submit(served).result() == [1, 2, 0]
    assert count.frame_count == 1


def test_what_was_traced_inside_a_block_does_not_outlive_it(list_torch: Callable[..., None], x: Tensor) -> None:
    list_torch(kernel("first", traceable=True))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    with kpt_core.use("reference"):
        assert hundreds(compiled(x)) == 0
    assert hundreds(compiled(x)) == 1


def test_eager_calls_in_between_compile_nothing_anew(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second")))
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count)
    for argument in (x, x.double(), torch.ones(5)):
        compiled(x)
        scale(argument, argument)
    compiled(x)
    assert count.frame_count == 1


def test_dtypes_and_gradients_are_looked_at(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", dtypes={"float32"})))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="aot_eager")
    assert [hundreds(compiled(t)) for t in (x, x.double(), x.clone().requires_grad_(), x)] == [1, 0, 0, 1]


def test_autocast(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.mixed", dtypes={"bfloat16"})))
    compiled = torch.compile(lambda x: mixed(x, x, x.to(torch.int32)), fullgraph=True, backend="eager")
    assert hundreds(compiled(x)) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert hundreds(compiled(x)) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_that_raises_inside_compiled_code_is_quarantined_and_the_next_one_runs(
    add: Add, x: Tensor, dynamic: bool
) -> None:
    add(Loopback(kernel("faulty", priority=1), kernel("second")))
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count, dynamic=dynamic)
    assert hundreds(compiled(x)) == 5
    Fault.error = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning, match="kernel loopback:faulty raised .* loopback:second ran") as warned:
        assert [hundreds(compiled(x)) for _ in range(5)] == [2] * 5
    assert [w.filename for w in warned] == [__file__] * 3
    assert Fault.calls == 4
    Fault.error = None
    assert hundreds(scale(x, x)) == 2  # known to eager calls, too
    kpt_core.refresh()
    assert hundreds(compiled(x)) == 5
    assert count.frame_count == 1


def test_a_reference_that_fails_names_the_kernel_s_error(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    add(Loopback(kernel("faulty")))
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    compiled(x)
    Fault.error = RuntimeError("no launch")
    monkeypatch.setattr(scale, "run_reference", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        compiled(x)
    assert caught.value.__cause__ is Fault.error


def test_explicit_choices_that_cannot_be_kept_raise(add: Add) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    whole = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    with kpt_core.use("loop"):
        with pytest.raises(NoKernelError, match=r"no kernel for sample.scale on cpu: loop was.*\n.*5 rows; takes at"):
            whole(torch.ones(5))
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


def test_wrong_arguments_are_told_as_in_eager_calls(add: Add, x: Tensor) -> None:
    """Where the whole function has to be one graph, Dynamo wraps the error."""
    add(Loopback(*KERNELS))
    compiled = torch.compile(lambda x: toy_ops.layer(x, x), backend="eager")
    with pytest.raises(InputError, match=r"toy.layer: x must be a tensor; got list"):
        compiled([x])
    with pytest.raises(TypeError, match=r"sample\.scale"):
        torch.compile(lambda x: scale(x), backend="eager")(x)
