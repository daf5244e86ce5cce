"""Who looks on sees one torch op: fake tensors, tracers, dispatch modes, the FLOP counter, the profiler; and meta."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kpt_core
import toy_ops
from kpt_core import Backend
from loopback import Fault, Loopback, checked, hundreds, kernel, scale
from toy_ops import KERNELS, RAN, append, best, layer

Add = Callable[[Backend], Backend]


@pytest.fixture(autouse=True)
def served(add: Add) -> None:
    add(Loopback(*KERNELS, kernel("faulty", backward="faulty_backward", priority=1)))
    RAN.clear()


class Seen(TorchDispatchMode):
    """Notes the torch ops of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_op_and_its_backward_and_the_kernels_run() -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with Seen() as seen:
        layer(x, weight).sum().backward()
    assert [name for name in seen.names if "kpt" in name] == ["kpt.toy_layer.default", "kpt.toy_layer_backward.default"]
    assert RAN == {"layer_kernel": 1, "layer_backward": 1}
    expected = torch.autograd.grad(layer.reference(x, weight).sum(), (x, weight))
    torch.testing.assert_close([x.grad, weight.grad], list(expected))


@pytest.mark.parametrize("whole", [True, False], ids=["all by the reference", "backward by a kernel"])
def test_what_no_backward_reads_is_not_computed(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "saves", pytest.fail)
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with Seen(), kpt_core.use("reference"):
        result = layer(x, weight).sum()
        if whole:
            result.backward()
    if not whole:
        result.backward()
        assert RAN == {"layer_kernel": 1, "layer_backward": 1}  # the kernel's own forward, for what it saves
    expected = torch.autograd.grad(layer.reference(x, weight).sum(), (x, weight))
    torch.testing.assert_close([x.grad, weight.grad], list(expected))


def test_the_flop_counter_counts_forward_and_backward() -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    once = 2 * 3 * 5 * 4
    with FlopCounterMode(display=False) as counter:
        out = layer(x, weight)
        assert counter.get_total_flops() == once
        out.sum().backward()
    assert counter.get_total_flops() == 3 * once
    plain = FlopCounterMode(display=False)
    with plain:
        layer.reference(x, weight).sum().backward()
    assert plain.get_total_flops() == 3 * once
    with FlopCounterMode(display=False) as counter, FakeTensorMode():
        layer(torch.empty(300, 5), torch.empty(5, 4))
    assert counter.get_total_flops() == 100 * once
    assert torch.utils.flop_counter.flop_registry[torch.ops.kpt.toy_layer] is not None


def test_the_flop_counter_counts_compiled_code(fresh_compiler: None) -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    compiled = torch.compile(lambda x, weight: layer(x, weight), backend="aot_eager")
    compiled(x, weight)
    with FlopCounterMode(display=False) as counter:
        compiled(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 3 * 5 * 4


def test_the_profiler_names_forward_and_backward() -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        layer(x, weight).sum().backward()
    names = {event.key for event in profiled.key_averages()}
    assert {"kpt::toy_layer", "kpt::toy_layer_backward"} <= names
    assert RAN == {"layer_kernel": 1, "layer_backward": 1}


def test_fake_tensors_tell_shapes_dtypes_and_gradients_and_run_nothing() -> None:
    with FakeTensorMode() as mode:
        x, weight = torch.empty(70, 5, requires_grad=True), torch.empty(5, 4, requires_grad=True)
        out = layer(x, weight)
        out.sum().backward()
        values, indices = best(torch.empty(3, 16, dtype=torch.float16), 4)
        total = append(torch.empty(6, 5), torch.empty(6, 5), torch.empty(1, 5), 2)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.requires_grad, x.grad.shape, weight.grad.shape) == ((70, 4), True, (70, 5), (5, 4))
    assert (values.shape, values.dtype, indices.dtype) == ((3, 4), torch.float16, torch.int64)
    assert total.shape == (6, 5)
    assert not RAN
    real = mode.from_tensor(torch.ones(4))
    assert isinstance(scale(real, real), FakeTensor)


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_tracers_see_the_op_and_quarantine_nothing(tracing: str, x: Tensor) -> None:
    """A kernel that can't do without storage is not asked for fakes."""
    Fault.error = RuntimeError("needs real memory")
    graph = make_fx(lambda x: scale(x, x), tracing_mode=tracing)(x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        scale(fake, fake)
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "kpt.sample_scale.default"
    ]
    assert Fault.calls == 0
    Fault.error = None
    assert hundreds(scale(x, x)) == 5
    assert kpt_core.explain(scale, x, x).kernel == "loopback:faulty"
    assert hundreds(graph(x)) == 5


def test_a_traced_graph_is_contained_when_it_runs(x: Tensor) -> None:
    graph = make_fx(lambda x: scale(x, x), tracing_mode="fake")(x)
    Fault.error = RuntimeError("no launch")
    with pytest.warns(kpt_core.KernelFailedWarning):
        assert hundreds(graph(x)) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_jit_trace_keeps_the_choice_for_later(x: Tensor) -> None:
    graph = torch.jit.trace(lambda x: scale(x, x), x)
    assert "kpt::sample_scale" in str(graph.graph)
    assert hundreds(graph(x)) == 5
    with kpt_core.use("reference"):
        assert hundreds(graph(x)) == 0


def test_meta_tensors_need_no_kernel() -> None:
    x, weight = torch.empty(9, 5, device="meta"), torch.empty(5, 4, device="meta", requires_grad=True)
    out = layer(x, weight)
    out.sum().backward()
    assert (out.shape, out.device.type, weight.grad.shape) == ((9, 4), "meta", (5, 4))
    assert not RAN
    with pytest.raises(kpt_core.InputError, match="must have 2 rows; got 3"):
        checked(torch.empty(3, device="meta"))


def test_a_default_device_is_no_reason_to_look_elsewhere(x: Tensor) -> None:
    """It is a mode as well, of another kind."""
    with torch.device("meta"):
        assert hundreds(scale(x, x)) == 5


def test_record_and_use_hold_where_others_look_on(x: Tensor) -> None:
    with kpt_core.record() as log, Seen():
        scale(x, x)
        with kpt_core.use("reference"):
            scale(x, x)
    assert [each.kernel for each in log] == ["loopback:faulty", "reference"]


def test_the_torch_op_is_what_torch_expects() -> None:
    """Its schema, its fake, its autograd formula and its use by AOT, by torch's own test."""
    for op, arguments in (
        (torch.ops.kpt.toy_layer, (torch.randn(3, 5, requires_grad=True), torch.randn(5, 4), None, "x")),
        (torch.ops.kpt.toy_best, (torch.randn(3, 16, requires_grad=True), 2, "x")),
        (torch.ops.kpt.toy_append, (torch.randn(6, 5), torch.randn(6, 5), torch.randn(2, 5), 1, "")),
        (torch.ops.kpt.toy_attend_functional, (
            torch.randn(2, 5, requires_grad=True), torch.randn(2, 5), torch.randn(6, 5), 2, 1, 0, 0.25, True, "q",
        )),
        (torch.ops.kpt.toy_layer_backward, (
            torch.randn(3, 4), torch.randn(3, 5), torch.randn(5, 4), None,
            [torch.randn(3, 4), torch.ones(3, dtype=torch.int32)], "x,weight",
        )),
    ):  # fmt: skip
        torch.library.opcheck(op.default, arguments)
    assert toy_ops.RAN
